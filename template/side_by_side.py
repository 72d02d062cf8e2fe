"""Draw what each technique changes in `train.py`: `python -m template.side_by_side`.

docs/side_by_side.svg is README's picture, the changed lines of `train_ddp.py`. docs/side_by_side/
holds a page for each script, with both files in full. They are text, so that a test finds out when
the scripts have changed since they were drawn.
"""

import difflib
import re
from html import escape
from pathlib import Path
from typing import NamedTuple

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from tools.compose import BASELINE, MARKER, split

TEMPLATE = Path(__file__).resolve().parents[1]
PICTURE = "docs/side_by_side.svg"
IN_PICTURE = "train_ddp.py"
SCRIPTS = sorted(path.name for path in TEMPLATE.glob("train_*.py"))
CONTEXT, FOLDABLE = 2, 4  # unchanged lines: around a change of the picture; that a page can fold
WIDTH, LINE, SIGN, CODE = 800, 18, 10, 28  # of the picture, in pixels; places of signs and code

COLOURS = """
:root { --text: #1f2328; --back: #fff; --rule: #d0d7de; --quiet: #f6f8fa; --new: #dafbe1;
  --old: #ffebe9; --edge: #1a7f37; --why: #0f5323; --word: #cf222e; --string: #0a3069;
  --comment: #59636e; --name: #6639ba; --number: #0550ae }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --back: #0d1117; --rule: #3d444d;
  --quiet: #151b23; --new: #12301f; --old: #3a1a1d; --edge: #3fb950; --why: #7ee787;
  --word: #ff7b72; --string: #a5d6ff; --comment: #9198a1; --name: #d2a8ff; --number: #79c0ff } }
.k, .kn, .ow { color: var(--word) } .sd, .s2, .s1 { color: var(--string) }
.c1 { color: var(--comment) } .nd, .nf { color: var(--name) }
.kc, .mi, .mf, .nb, .vm { color: var(--number) } .why { color: var(--why); font-weight: bold }
"""
OF_PICTURE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre;
  color: var(--text) } text, tspan { fill: currentColor }
.bold { font-weight: bold } .back { fill: var(--back) } .new { fill: var(--new) }
.old { fill: var(--old) } .rule { stroke: var(--rule) }
"""
OF_PAGES = """
:root { color-scheme: light dark } * { box-sizing: border-box } a { color: var(--number) }
body { margin: 0 auto; max-width: 110rem; color: var(--text); background: var(--back);
  font: 1rem/1.4 system-ui, sans-serif } header { padding: 1rem .8rem }
h1 { margin: 0 0 .6rem; font-size: 1.3rem } nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem }
[aria-current] { color: var(--text); font-weight: bold; text-decoration: none }
h2, summary, .line { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
h2 { margin: 0; padding: .3rem 5ch; font-weight: bold; background: var(--new) }
h2:first-child, del { background: var(--old) } .files { position: sticky; top: 0; z-index: 1 }
summary { padding: .1rem .8rem; color: var(--comment); background: var(--quiet); cursor: pointer }
ins, del { display: block; text-decoration: none } ins { background: var(--new) }
.note .c1 { color: var(--why); font-weight: bold } .twin { display: none }
.change { margin: .4rem 0; border: solid var(--edge); border-width: 1px 0 }
.line { position: relative; min-height: 1.5em; white-space: pre-wrap; overflow-wrap: anywhere;
  padding: 0 .5rem 0 calc((var(--in) + 7) * 1ch); text-indent: calc((var(--in) + 2) * -1ch) }
.line::before { content: attr(data-line); position: absolute; left: .5ch; width: 3ch;
  text-indent: 0; text-align: right; color: var(--comment); font-weight: normal }
@media (min-width: 1100px) {
  .files, .row { display: grid; grid-template-columns: 1fr 1fr } .row > * { min-width: 0 }
  .twin { display: block } .row > :last-child { border-left: 1px solid var(--rule) }
  .change .row > :last-child:has(ins) { background: var(--new) }
  .note { width: fit-content; margin-left: auto; border-left: 4px solid var(--edge) }
  .note .line { padding-left: 5ch; text-indent: 0; white-space: normal } }
"""


class Line(NamedTuple):
    number: int
    text: str
    html: str


def read(name: str) -> tuple[str, list[Line], list[Line]]:
    """Read a script: what its docstring says first, the docstring's lines, and all others."""
    text = (TEMPLATE / name).read_text(encoding="utf-8")
    html = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    html = re.sub(r'<span class="(?:n|nn|o|p|w)">([^<]*)</span>', r"\1", html)  # have no colour
    html = html.replace(f'"c1">{MARKER}', f'"why">{MARKER}')
    both = zip(text.splitlines(), html.splitlines(), strict=True)
    lines = [Line(number, *line) for number, line in enumerate(both, 1)]
    head, code = split(text)
    start = len(lines) - len(code.splitlines())
    title = " ".join(head.removeprefix('"""').partition("\n\n")[0].split())
    return escape(title), lines[:start], lines[start:]


def compare(name: str) -> tuple[list[Line], list[Line], difflib.SequenceMatcher[str]]:
    """Compare the lines of `train.py` and of a script that follow the docstrings."""
    old, new = read(BASELINE)[2], read(name)[2]
    texts = [line.text for line in old], [line.text for line in new]
    return old, new, difflib.SequenceMatcher(None, *texts, autojunk=False)


def draw(name: str = IN_PICTURE) -> str:
    """Draw a script's changes of `train.py` as SVG, with two lines around each."""
    rows = [("old", "−", f'<tspan class="bold">{BASELINE}</tspan>')]
    rows += [("new", "+", f'<tspan class="bold">{name}</tspan>: {read(name)[0]}')]
    old, new, matcher = compare(name)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        rows += [("gap", "", "")] * (group[0][1] > 0)  # lines are left out above
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                rows += [("", "", line.html) for line in new[j1:j2]]
            else:
                rows += [("old", "−", line.html) for line in old[i1:i2]]
                rows += [("new" if line.text else "", "+", line.html) for line in new[j1:j2]]

    height = LINE * len(rows)
    size = f'width="{WIDTH}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height}">']
    parts += [f'<style>{COLOURS}{OF_PICTURE}</style>\n<rect class="back" {size}/>']
    for y, (kind, sign, html) in zip(range(0, height, LINE), rows, strict=True):
        if kind == "gap":
            parts.append(f'<path class="rule" d="M0 {y + LINE // 2}H{WIDTH}"/>')
        elif kind:
            parts.append(f'<rect class="{kind}" y="{y}" width="{WIDTH}" height="{LINE}"/>')
            parts.append(f'<text x="{SIGN}" y="{y + 13}">{sign}</text>')
        if html:
            html = html.replace("<span", "<tspan").replace("</span", "</tspan")
            parts.append(f'<text x="{CODE}" y="{y + 13}" xml:space="preserve">{html}</text>')
    return "\n".join([*parts, "</svg>\n"])


def element(tag: str, lines: list[Line]) -> str:
    """Return lines as an HTML element; an empty string if there are none."""
    parts = [f"<{tag}>"]
    for number, text, html in lines:
        indent = len(text) - len(text.lstrip())
        parts.append(f'<div class="line" data-line="{number}" style="--in:{indent}">{html}</div>')
    return "\n".join([*parts, f"</{tag.split()[0]}>"]) if lines else ""


def row(kind: str, left: str, right: str) -> str:
    return f'<div class="row">\n<div class="{kind}">{left}</div>\n<div>{right}</div>\n</div>'


def unchanged(old: list[Line], new: list[Line]) -> str:
    both = row("twin", element("div", old), element("div", new))
    summary = f"<summary>{len(new)} unchanged lines</summary>"
    return f'<details open="open">{summary}\n{both}\n</details>' if len(new) >= FOLDABLE else both


def changed(old: list[Line], new: list[Line]) -> str:
    """Return a change as HTML; to the left of new lines, what they replace and their comment."""
    pieces: list[tuple[list[Line], list[Line]]] = [([], [])]
    for line in new:
        comment, code = pieces[-1]
        text = line.text.lstrip()
        if text.startswith(MARKER):
            pieces.append(([line], []))
        elif comment and not code and text.startswith("#"):  # its second line
            comment.append(line)
        else:
            code.append(line)
    rows = []
    for number, (comment, code) in enumerate(pieces):
        left = element("del", old) if number == min(1, len(pieces) - 1) else ""
        left += element('ins class="note"', comment)
        if left or code:
            rows.append(row("reason", left, element("ins", code)))
    return "\n".join(['<div class="change">', *rows, "</div>"])


def draw_page(name: str) -> str:
    """Draw `train.py` and a script as HTML, side by side where the window is wide enough."""
    title, docstring, _ = read(name)
    links = "\n".join(f'<a href="{Path(page_of(other)).name}">{other}</a>' for other in SCRIPTS)
    links = links.replace(f">{name}<", f' aria-current="page">{name}<')
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{name} beside {BASELINE}</title>\n<style>{COLOURS}{OF_PAGES}</style>\n</head>",
        f"<body>\n<header>\n<h1>{title}</h1>\n<nav>\n{links}\n</nav>\n</header>",
        f'<main>\n<div class="files"><h2>{BASELINE}</h2><h2>{name}</h2></div>',
        changed(read(BASELINE)[1], docstring),
    ]
    old, new, matcher = compare(name)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        parts.append((unchanged if kind == "equal" else changed)(old[i1:i2], new[j1:j2]))
    return "\n".join([*parts, "</main>\n</body>\n</html>\n"])


def page_of(name: str) -> str:
    return f"docs/side_by_side/{name.removeprefix('train_').removesuffix('.py')}.html"


def drawn() -> dict[str, str]:
    """Return all files, by their paths in the repository."""
    return {PICTURE: draw(), **{page_of(name): draw_page(name) for name in SCRIPTS}}


if __name__ == "__main__":
    for path, text in drawn().items():
        (TEMPLATE / path).write_text(text, encoding="utf-8")
