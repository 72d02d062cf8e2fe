"""Write the tables of loaders and training loops, and two charts, into docs/benchmarks.md.

python -m benchmarks.readme benchmarks/results/<machine>-<date>
"""

import sys
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.records import latest
from benchmarks.report import markdown, tables

PAGE = REPOSITORY / "docs" / "benchmarks.md"
START, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"
COLUMNS = (
    *("subject", "speed", "against", "share of the limit"),
    *("time per step", "over the bare loop"),
)
PICTURES = {
    "alternatives.png": "Bar chart: speed of the template's loaders and others",
    "workers.png": "Bar chart: speed by number of workers or threads",
}
ABOUT_LOOPS = """\
Time per step of the training loop, which checks for non-finite gradients, logs, draws a progress
bar and saves checkpoints, against a bare loop and the loops of two frameworks:"""


def excerpt(folder: Path) -> str:
    """Markdown tables of loaders and loops, and two charts; pipelines without results are left out.

    Args:
        folder: results, inside the repository.
    """
    rows = [row for row in latest(folder / "alternatives.csv") if row.repeats]
    newest = max(rows, key=lambda row: row.date)
    link = f"../{folder.resolve().relative_to(REPOSITORY)}"
    parts = [
        f"Measured on {newest.cpu}, {newest.cores} cores, {newest.gpu or 'no GPU'}, on "
        f"{newest.date[:10]}; versions, settings and more in [`report.md`]({link}/report.md). "
        "Medians with 95 % intervals; ratios are taken within rounds, in which all ran alternately."
    ]
    for name in ("alternatives", "loop_overhead"):
        chosen = rows if name == "alternatives" else latest(folder / f"{name}.csv")
        parts += [ABOUT_LOOPS] if name == "loop_overhead" else []
        for title, table in tables(name, chosen).items():
            columns = [n for n, header in enumerate(table[0]) if header.startswith(COLUMNS)]
            table[0][0] = title
            parts.append(markdown([[line[place] for place in columns] for line in table]))
    parts += [f"![{text}]({link}/{name})" for name, text in PICTURES.items()]
    return "\n\n".join(parts)


def with_excerpt(text: str, folder: Path) -> str:
    """Replace the text between the markers in a page."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{excerpt(folder)}\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    PAGE.write_text(with_excerpt(PAGE.read_text(), Path(sys.argv[1])))
