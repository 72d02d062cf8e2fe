"""Draw README's picture of two scripts side by side: `python template/side_by_side.py`.

What the right one adds or changes is green, what it replaces is red. The picture is text (SVG), so
that a test finds out when the scripts have changed since it was drawn.
"""

import difflib
from html import escape
from itertools import zip_longest
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[1]
PICTURE = TEMPLATE / "docs" / "side_by_side.svg"
SCRIPTS = ("train.py", "train_ddp.py")
FIRST_LINE = "@hydra.main"
COLUMN, LINE, MARGIN = 820, 17, 12  # width, height, and space to the left of text, in pixels
STYLE = (
    "text { font: 13px ui-monospace, Menlo, Consolas, monospace; white-space: pre; fill: #1f2328 }"
)


def draw() -> str:
    """Draw the picture as SVG: from the decorator of `main` to the last line of it."""
    texts = [(TEMPLATE / name).read_text() for name in SCRIPTS]
    old, new = (
        text[text.index(FIRST_LINE) : text.index("\n\n\nif __name__")].splitlines()
        for text in texts
    )
    left, right = [(SCRIPTS[0], "#eaeef2")], [(SCRIPTS[1], "#eaeef2")]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        red, green = ("", "") if kind == "equal" else ("#ffebe9", "#dafbe1")
        pairs = zip_longest(old[i1:i2], new[j1:j2])
        for one, other in pairs:
            left.append(("", "#f6f8fa") if one is None else (one, red))
            right.append(("", "#f6f8fa") if other is None else (other, green))

    width, height = 2 * COLUMN, LINE * len(left) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for x, lines in ((0, left), (COLUMN, right)):
        for number, (line, colour) in enumerate(lines):
            y = LINE * number
            if colour:
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{COLUMN}" height="{LINE}" fill="{colour}"/>'
                )
            if line:
                bold = ' style="font-weight: bold"' if "# new #:" in line or number == 0 else ""
                text = escape(line, quote=False)
                parts.append(
                    f'<text x="{x + MARGIN}" y="{y + 13}"{bold} xml:space="preserve">{text}</text>'
                )
    parts.append(f'<path d="M{COLUMN} 0V{height}" stroke="#d0d7de"/>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw())
