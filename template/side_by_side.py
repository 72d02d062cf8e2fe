"""Draw what each technique changes in `train.py`: `python -m template.side_by_side`.

docs/side_by_side.svg is README's picture, the changed lines of `train_ddp.py`: text, so that a test
finds out when the script has changed since it was drawn. A page for each script, with both files in
full, goes to docs/side_by_side/, which git ignores.
"""

import difflib
import re
from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from tools.compose import BASELINE, MARKER, split

TEMPLATE = Path(__file__).resolve().parents[1]
PICTURE = "docs/side_by_side.svg"
PAGES = "docs/side_by_side"
IN_PICTURE = "train_ddp.py"
SCRIPTS = sorted(path.name for path in TEMPLATE.glob("train_*.py"))
CONTEXT = 2
"""Unchanged lines around a change of the picture."""
WIDTH, LINE, SIGN, CODE = 800, 18, 10, 28  # of the picture, in pixels; places of signs and code

STYLE = """
:root { --text: #1f2328; --back: #fff; --rule: #d0d7de; --new: #dafbe1;
  --old: #ffebe9; --why: #0f5323; --word: #cf222e; --string: #0a3069;
  --comment: #59636e; --name: #6639ba; --number: #0550ae }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --back: #0d1117; --rule: #3d444d;
  --new: #12301f; --old: #3a1a1d; --why: #7ee787;
  --word: #ff7b72; --string: #a5d6ff; --comment: #9198a1; --name: #d2a8ff; --number: #79c0ff } }
.k, .kn, .ow { color: var(--word) } .sd, .s2, .s1 { color: var(--string) }
.c1 { color: var(--comment) } .nd, .nf { color: var(--name) }
.kc, .mi, .mf, .nb, .vm { color: var(--number) } .why { color: var(--why); font-weight: bold }

text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre;
  color: var(--text) } text, tspan { fill: currentColor }
.bold { font-weight: bold } .back { fill: var(--back) } .new { fill: var(--new) }
.old { fill: var(--old) } .rule { stroke: var(--rule) }
"""


def read(name: str) -> tuple[str, list[str], list[str]]:
    """Return what a script's docstring says first, and its lines after it, as text and as HTML."""
    text = (TEMPLATE / name).read_text(encoding="utf-8")
    html = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    html = re.sub(r'<span class="(?:n|nn|o|p|w)">([^<]*)</span>', r"\1", html)  # have no colour
    html = html.replace(f'"c1">{MARKER}', f'"why">{MARKER}')
    head, code = split(text)
    title = " ".join(head.removeprefix('"""').partition("\n\n")[0].split())
    return escape(title), code.splitlines(), html.splitlines()[len(head.splitlines()) :]


def draw(name: str = IN_PICTURE) -> str:
    """Draw a script's changes of `train.py` as SVG, with two lines around each."""
    _, old, old_html = read(BASELINE)
    title, new, new_html = read(name)
    rows = [("old", "−", f'<tspan class="bold">{BASELINE}</tspan>')]
    rows += [("new", "+", f'<tspan class="bold">{name}</tspan>: {title}')]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        if group[0][1] > 0:  # lines are left out above
            rows.append(("gap", "", ""))
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                rows += [("", "", line) for line in new_html[j1:j2]]
            else:
                rows += [("old", "−", line) for line in old_html[i1:i2]]
                rows += [("new" if line else "", "+", line) for line in new_html[j1:j2]]

    height = LINE * len(rows)
    size = f'width="{WIDTH}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height}">']
    parts += [f'<style>{STYLE}</style>\n<rect class="back" {size}/>']
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


def draw_page(name: str) -> str:
    """Draw `train.py` and a script in full, side by side, as HTML."""
    old, new = ((TEMPLATE / script).read_text().splitlines() for script in (BASELINE, name))
    return difflib.HtmlDiff(wrapcolumn=100).make_file(old, new, BASELINE, name)


def main() -> None:
    """Write the picture and the pages."""
    (TEMPLATE / PICTURE).write_text(draw(), encoding="utf-8")
    (TEMPLATE / PAGES).mkdir(exist_ok=True)
    for name in SCRIPTS:
        (TEMPLATE / PAGES / f"{Path(name).stem}.html").write_text(draw_page(name))
    print(f"draws {PICTURE}, and a page for each script in {PAGES}")


if __name__ == "__main__":
    main()
