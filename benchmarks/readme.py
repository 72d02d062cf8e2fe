"""Write the tables of loaders, of training loops and of one GPU, and two charts, into
docs/benchmarks.md.

python -m benchmarks.readme benchmarks/results/<machine>-<date>
"""

import sys
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.entry_points import WAIT
from benchmarks.gpu import BUSY
from benchmarks.gpu_loaders import ALONE
from benchmarks.records import Measurement, latest
from benchmarks.report import markdown, tables
from benchmarks.run import SPEED

PAGE = REPOSITORY / "docs" / "benchmarks.md"
START, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"
GPU_START, GPU_END = "<!-- one gpu -->", "<!-- end of one gpu -->"
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


def gpu_excerpt(rows: list[Measurement]) -> str:
    """Markdown tables of one GPU, of photos and of other data: a line per loader."""
    of_others = [row for row in rows if row.case.startswith(ALONE) and "photos" not in row.case]
    tables = []
    for some in ([row for row in rows if row not in of_others], of_others):
        lines: dict[str, dict[str, list[Measurement]]] = {}
        for row in some:
            lines.setdefault(str(row.full_subject), {}).setdefault(row.case, []).append(row)
        cases = list(dict.fromkeys(row.case for row in some))
        table = [[f"{rows[0].gpu}, {rows[0].cores} cores", *cases]]
        table += [[who, *(cell(of.get(case, [])) for case in cases)] for who, of in lines.items()]
        tables += [markdown(table)] if some else []
    return "\n\n".join(tables)


def cell(rows: list[Measurement]) -> str:
    """Speed, with the utilisation and the wait for data where they are known."""
    found = {row.quantity: row for row in rows}
    if not found:
        return ""
    if not found[SPEED].repeats:
        return "failed"
    text = f"{found[SPEED].median:,.0f} {found[SPEED].unit.replace('images/s', '')}".strip()
    details = {BUSY: "busy", WAIT: "waiting"}
    shares = [f"{found[k].median:.0f} % {word}" for k, word in details.items() if k in found]
    return f"{text} ({', '.join(shares)})" if shares else text


def with_gpu(text: str, folder: Path) -> str:
    """Replace the table of one GPU in a page."""
    before, _, rest = text.partition(GPU_START)
    _, _, after = rest.partition(GPU_END)
    table = gpu_excerpt(latest(folder / "gpu.csv"))
    return f"{before}{GPU_START}\n{table}\n{GPU_END}{after}"


def with_excerpt(text: str, folder: Path) -> str:
    """Replace the text between the markers in a page."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{excerpt(folder)}\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    if (folder / "alternatives.csv").exists():
        PAGE.write_text(with_excerpt(PAGE.read_text(), folder))
    if (folder / "gpu.csv").exists():
        PAGE.write_text(with_gpu(PAGE.read_text(), folder))
