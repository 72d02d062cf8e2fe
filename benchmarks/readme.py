"""Puts the comparison of loaders, that of loops and two pictures of some results into docs/benchmarks.md.

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
    "alternatives.png": "Speed of the loaders beside all others, as bars",
    "workers.png": "Speed by number of workers or threads, as bars",
}
ABOUT_LOOPS = """\
What the training loop costs beside the model, with its guard against non-finite gradients, log, progress
bar and checkpoints, and what two frameworks' loops cost:"""


def excerpt(folder: Path) -> str:
    """Tables of those ways of loading that were measured, the loops' cost, and pictures, as Markdown.

    Args:
        folder: the results, below the repository.
    """
    rows = [row for row in latest(folder / "alternatives.csv") if row.repeats]
    newest = max(rows, key=lambda row: row.date)
    where = f"../{folder.resolve().relative_to(REPOSITORY)}"
    parts = [
        f"Measured on {newest.cpu}, {newest.cores} cores, {newest.gpu or 'no GPU'}, on "
        f"{newest.date[:10]}; versions, settings and more in [`report.md`]({where}/report.md). Medians "
        "with their 95 % intervals; ratios are those of rounds in which all took turns."
    ]
    for name in ("alternatives", "loop_overhead"):
        chosen = rows if name == "alternatives" else latest(folder / f"{name}.csv")
        parts += [ABOUT_LOOPS] if name == "loop_overhead" else []
        for title, table in tables(name, chosen).items():
            places = [n for n, header in enumerate(table[0]) if header.startswith(COLUMNS)]
            table[0][0] = title
            parts.append(markdown([[line[place] for place in places] for line in table]))
    parts += [f"![{text}]({where}/{name})" for name, text in PICTURES.items()]
    return "\n\n".join(parts)


def with_excerpt(text: str, folder: Path) -> str:
    """The page with what is between the marks replaced."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{excerpt(folder)}\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    PAGE.write_text(with_excerpt(PAGE.read_text(), Path(sys.argv[1])))
