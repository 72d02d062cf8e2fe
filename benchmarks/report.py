"""Report of results from their CSV files alone: tables in `report.md` and a PNG per benchmark.

python -m benchmarks.report benchmarks/results/<machine>-<date>
"""

import sys
from pathlib import Path

from benchmarks import plots
from benchmarks.agreement import AGREEMENTS
from benchmarks.augmentations import OURS as AUGMENTED
from benchmarks.bottleneck import SYNTHETIC
from benchmarks.entry_points import WAIT
from benchmarks.loading import PACKING
from benchmarks.loop_overhead import BARE, PLAIN
from benchmarks.pipelines import DECODING
from benchmarks.plots import LIMIT, OTHERS, OURS, Panel
from benchmarks.records import Measurement, Subject, Summary, latest, ratio
from benchmarks.remote import PEAK
from benchmarks.run import SPEED, STEP_TIME, format_interval, format_number
from benchmarks.scale import FIRST_BATCH, GROWTH, RESUME
from benchmarks.shuffle import CLASSES, MOVED, ORIGINS
from benchmarks.simulate import EFFICIENCY, ERROR
from benchmarks.worker_costs import MEMORY, OPERATION, START

PICTURED = (
    *(SPEED, STEP_TIME, WAIT, PACKING, FIRST_BATCH, RESUME, GROWTH, PEAK),
    *(CLASSES, ORIGINS, MOVED, EFFICIENCY, ERROR, START, MEMORY, OPERATION),
)
Rows = list[Measurement]
Line = dict[str, Measurement]
"""Rows of a subject, by quantity."""

Table = list[list[str]]
"""Cells by line; the first line is the header."""

TITLES = {
    "alternatives": "Loaders compared",
    "loaders": "Loaders",  # earlier results only
    "workers": "Workers and threads",
    "worker_costs": "Worker processes",
    "out_of_band": "Decoding in advance",
    "entry_points": "Entry points",
    "bottleneck": "Bottleneck",
    "loop_overhead": "Overhead of the training loop",
    "scale": "Number of samples",
    "shuffle": "Sample order with shards",
    "remote": "Shards on a server",
    "augmentations": "Augmentations of batches",
    "agreement": "Exchange of flags between ranks",
    "gpu": "One GPU",
    "simulate": "Many ranks, simulated",
}
FACTS = """\
{cpu}, {cores} cores, {memory_gib:g} GiB memory; {gpu}.

{versions}.

Commit {commits}; {first} to {last}.

Figures are medians. Brackets, and black lines in the charts, show 95 % confidence intervals, or the
range of fewer than 6 samples. The subjects of a table ran alternately in short time slices; ratios
are taken within each round and then summarised. The duration of an epoch refers to the published
size of a data set. Without GPUs, a device of an entry point is one CPU core. Entry points and the
loaders on one GPU ran one after another; efficiencies of entry points are ratios of medians."""


def draw(folder: Path) -> Path:
    """Write the report of a folder with results.

    Returns:
        Path of `report.md`.

    Raises:
        FileNotFoundError: there are no results.
        ValueError: a file has wrong columns or values.
    """
    files = {name: folder / f"{name}.csv" for name in TITLES}
    measured = {name: latest(path) for name, path in files.items() if path.exists()}
    if not measured:
        raise FileNotFoundError(
            f"no results in {folder} ({', '.join(path.name for path in files.values())}); run "
            f"python -m benchmarks results={folder}"
        )
    rows = sorted((row for rows in measured.values() for row in rows), key=lambda row: row.date)
    facts = FACTS.format(
        **(vars(rows[-1]) | {"gpu": rows[-1].gpu or "no GPU"}),
        commits=", ".join(dict.fromkeys(row.commit for row in rows)),
        first=rows[0].date,
        last=rows[-1].date,
    )
    parts = ["# Benchmarks", facts]
    for name, rows in measured.items():
        plots.draw(folder / f"{name}.png", panels(name, rows))
        parts += [f"## {TITLES[name]}", f"![{TITLES[name]}]({name}.png)"]
        for title, table in tables(name, rows).items():
            parts += [f"{title}:", markdown(table)]
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def markdown(table: Table) -> str:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in table]
    cells.insert(1, ["---"] * len(table[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def tables(name: str, rows: Rows) -> dict[str, Table]:
    """Tables by title, one per case: a line per subject with measured and derived figures, a note.

    Columns without entries are left out.
    """
    found: dict[str, Table] = {}
    for case, group in by_case(rows).items():
        subjects: dict[Subject, Line] = {}
        for row in group:
            subjects.setdefault(row.full_subject, {})[row.quantity] = row
        lines = list(subjects.values())
        if name == "alternatives":
            lines.sort(key=lambda line: -speed(main_row(line)))
        table = [cells(name, line, group, rows) for line in lines]
        header = [title for title in table[0] if any(line[title] for line in table)]
        found[case] = [header, *([line[title] for title in header] for line in table)]
    return found


def cells(name: str, line: Line, group: Rows, rows: Rows) -> dict[str, str]:
    """Cells of a subject's line by column; `group`: rows of its case, `rows`: all rows."""
    row = main_row(line)
    found = {
        "subject": row.subject,
        "settings": row.settings,
        "parallel": row.full_subject.parallelism,
    }
    found |= {
        f"{r.quantity} ({r.unit})": format_interval(line.get(r.quantity))
        for r in group
        if r.repeats
    }
    if name == "entry_points":
        found["scaling efficiency"] = efficiency(row, group, row.subject)
        found["speed per device against train.py"] = efficiency(row, group, "train.py")
    elif name == "loop_overhead":
        found["over the bare loop (%)"] = format_interval(overhead(row, group))
    else:
        # Reference for each settings: the first subject that is not a limit.
        candidates = [r for r in group if r.quantity in (SPEED, STEP_TIME) and r.repeats]
        references = {r.settings: r for r in reversed(candidates) if bar_colour(r) != LIMIT}
        names = {r.subject for r in references.values()}
        found[f"against {names.pop()}" if len(names) == 1 else "ratio"] = (
            "1x"
            if row in references.values()
            else format_interval(ratio(row, references.get(row.settings)), "x")
        )
        limit = next((r for r in candidates if r.subject == DECODING.name), None)
        share = None if from_pixels(row) or name != "alternatives" else ratio(row, limit)
        found["share of the limit"] = f"{100 * share.median:.0f} %" if share else ""
        found["epoch"] = duration(row.epoch_size / speed(row)) if speed(row) else ""
        found["packing is paid for after (epochs)"] = break_even_epochs(row, rows)
    return found | {"note": row.note}


def efficiency(row: Measurement, rows: Rows, script: str) -> str:
    """Speed per device relative to `script` on one device."""
    one = Subject(script, settings=row.settings)
    reference = next((r for r in rows if r.quantity == SPEED and r.full_subject == one), None)
    if row.quantity != SPEED or reference is None or row is reference:
        return ""
    return f"{100 * row.median / row.num_devices / reference.median:.0f} %"


def overhead(row: Measurement, rows: Rows) -> Summary | None:
    """Additional time relative to the bare loop, or the plain script, in %."""
    found = ratio(row, next((row for row in rows if row.subject in (BARE, PLAIN)), None))
    if found is None or row.subject in (BARE, PLAIN):
        return None
    return Summary(*(100 * (value - 1) for value in found))


def break_even_epochs(row: Measurement, rows: Rows) -> str:
    """Epochs after which reading the pack has saved the time of packing the published data set."""
    whole = row.case.partition(",")[0]
    packing = [r for r in rows if r.case == whole and r.quantity == PACKING and r.repeats]
    others = [r for r in rows if r.case == row.case and not is_packed(r) and speed(r)]
    if not packing or not others or not is_packed(row) or not speed(row):
        return ""
    whole_s = packing[0].median * packing[0].epoch_size / int(packing[0].note.split()[0])
    saved_s = min(r.epoch_size / r.median for r in others) - row.epoch_size / row.median
    return format_number(whole_s / saved_s) if saved_s > 0 else "never"


def panels(name: str, rows: Rows) -> list[Panel]:
    """Panels of a benchmark's figure."""
    found: list[Panel] = []
    for case, group in by_case(rows).items():
        if name == "loop_overhead":
            others = [row for row in group if row.subject not in (BARE, PLAIN)]
            bars = [
                (str(row.full_subject), overhead(row, group), bar_colour(row)) for row in others
            ]
            found.append((case, "% of the bare loop's time per step, on top of it", bars))
            continue
        for quantity in PICTURED:
            chosen = [row for row in group if row.quantity == quantity]
            # A separate panel: these are so fast that the other bars would be too short.
            pixels = [row for row in chosen if name == "alternatives" and from_pixels(row)]
            encoded = [row for row in chosen if row not in pixels]
            for part, title in ((encoded, case), (pixels, f"{case}, from pixels")):
                bars = [
                    (str(r.full_subject), r.summary if r.repeats else None, bar_colour(r))
                    for r in part
                ]
                if part:
                    found.append((title, f"{quantity} ({part[0].unit})", bars))
    return found


def by_case(rows: Rows) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return groups


def main_row(line: Line) -> Measurement:
    """Row of the speed or time per step if there is one, otherwise the first row."""
    return line.get(SPEED) or line.get(STEP_TIME) or next(iter(line.values()))


def speed(row: Measurement) -> float:
    """Median speed; 0 if it was not measured or the case has no epochs."""
    return row.median if row.quantity == SPEED and row.repeats and row.epoch_size else 0.0


def bar_colour(row: Measurement) -> str:
    """Colour of limits, the template's own programs, and others."""
    if row.subject.startswith("limit:"):
        return LIMIT
    ours = ("loader=", "data.shuffle=", "train", "python -m", list(AGREEMENTS)[-1], AUGMENTED)
    return OURS if row.subject.startswith(ours) and row.subject != SYNTHETIC else OTHERS


def is_packed(row: Measurement) -> bool:
    return row.subject == "loader=packed"


def from_pixels(row: Measurement) -> bool:
    """True for subjects that do not decode images."""
    return is_packed(row) or row.subject.startswith("limit: copying")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{format_number(seconds)} s"
    return (
        f"{format_number(seconds / 60)} min"
        if seconds < 7200
        else f"{format_number(seconds / 3600)} h"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(draw(Path(sys.argv[1])))
