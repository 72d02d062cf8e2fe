"""Puts the comparison of loaders, that of loops and two pictures of some results into the README.

python -m benchmarks.readme benchmarks/results/<machine>-<date>
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.records import REPOSITORY, latest, read
from benchmarks.sections import alternatives, loop_overhead

README = REPOSITORY / "README.md"
START, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"
PICTURES = {
    "alternatives.png": "Speed of the loaders beside all others, as bars",
    "workers.png": "Seconds per epoch against the number of workers or threads",
}
COLUMNS = ["speed", "against", "share of the limit"]


def excerpt(folder: Path) -> str:
    """Tables of those ways of loading that were measured, the loops' cost, and pictures, as Markdown.

    Args:
        folder: the results, below the repository.
    """
    rows = [row for row in latest(read(folder / "alternatives.csv")) if row.repeats]
    loops = latest(read(folder / "loop_overhead.csv"))
    with tempfile.TemporaryDirectory() as unused:
        tables = alternatives(rows, Path(unused)).tables
        costs = loop_overhead(loops, Path(unused)).conclusions
    newest = max(rows, key=lambda row: row.date)
    where = folder.resolve().relative_to(REPOSITORY)
    parts = [
        f"Measured on {newest.cpu}, {newest.cores} cores, {newest.gpu or 'no GPU'}, on "
        f"{newest.date[:10]}; versions, settings and more in [`report.md`]({where}/report.md). Medians "
        "with their 95 % intervals; ratios are those of rounds in which all took turns."
    ]
    for table in tables:
        chosen = [
            number
            for number, name in enumerate(table.header)
            if number == 0 or name.startswith(tuple(COLUMNS))
        ]
        lines = [[line[number] for number in chosen] for line in (table.header, *table.rows)]
        lines[0][0] = table.title.split(": ")[0]
        lines.insert(1, ["---"] * len(chosen))
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    parts.append(
        "What the training loop costs beside the model, with its guard against non-finite gradients, log, "
        "progress bar and checkpoints, and what two frameworks' loops cost:"
    )
    parts.append("\n".join(f"- {cost}" for cost in costs))
    parts += [f"![{text}]({where}/{name})" for name, text in PICTURES.items()]
    return "\n\n".join(parts)


def with_excerpt(readme: str, folder: Path) -> str:
    """The README with what is between the marks replaced."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{excerpt(folder)}\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    README.write_text(with_excerpt(README.read_text(), Path(sys.argv[1])))
