"""Draws the report from the CSV files alone: tables in `report.md`, and a PNG for each benchmark.

python -m benchmarks.report benchmarks/results/<machine>-<date>
"""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import plots
from benchmarks.agreement import AGREEMENTS
from benchmarks.bottleneck import SYNTHETIC
from benchmarks.entry_points import COPIES, WAIT
from benchmarks.loop_overhead import BARE
from benchmarks.out_of_band import PACKING
from benchmarks.plots import LIMIT, OTHERS, OURS, Bar, Panel
from benchmarks.records import Measurement, Subject, Summary, latest, ratio
from benchmarks.run import SPEED, STEP_TIME, number, span

Rows = list[Measurement]
Table = list[list[str]]
"""The first line is the header."""

TITLES = {
    "alternatives": "Beside all others",
    "loaders": "Loaders",
    "workers": "Workers and threads",
    "out_of_band": "Decoding ahead of time",
    "entry_points": "Entry points",
    "bottleneck": "Bottleneck",
    "loop_overhead": "The training loop's own cost",
    "agreement": "Agreement of ranks in each step",
}
DECODING = "limit: decoding alone"
FACTS = """\
{cpu}, {cores} cores, {memory_gib:g} GiB memory; {gpu}.

{versions}.

Commit {commits}; {first} to {last}.

Figures are medians; in brackets, and as black lines in the pictures, their 95 % confidence intervals
(with fewer than 6 samples, their range). Subjects of one table were measured side by side, in turns;
ratios are those of rounds in which all took turns. An epoch is one of the published data's size. For
entry points a device without GPUs is one CPU core; their runs follow one another, so their efficiencies
are quotients of medians."""


def draw(folder: Path) -> Path:
    """Draw the report of a folder of results.

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
            f"{folder} holds no results ({', '.join(path.name for path in files.values())}); run "
            f"python -m benchmarks results={folder}"
        )
    parts = ["# Benchmarks", facts([row for rows in measured.values() for row in rows])]
    for name, rows in measured.items():
        picture = draw_picture(folder / f"{name}.png", name, rows)
        parts += [f"## {TITLES[name]}", f"![{TITLES[name]}]({picture.name})"]
        for title, table in tables(name, rows).items():
            parts += [f"{title}:", markdown(table)]
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def facts(rows: Rows) -> str:
    """Where, when and with what all was measured."""
    newest = max(rows, key=lambda row: row.date)
    return FACTS.format(
        **(vars(newest) | {"gpu": newest.gpu or "no GPU"}),
        commits=", ".join(dict.fromkeys(row.commit for row in rows)),
        first=min(row.date for row in rows),
        last=newest.date,
    )


def markdown(table: Table) -> str:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in table]
    cells.insert(1, ["---"] * len(table[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def tables(name: str, rows: Rows) -> dict[str, Table]:
    """One for each case, by its title."""
    found = {case: case_table(name, group) for case, group in by_case(rows).items()}
    if name != "out_of_band":
        return found
    packing = {row.case: row for row in rows if row.quantity == PACKING}
    found = {case: table for case, table in found.items() if case not in packing}
    return found | {"packing": packing_table(rows, list(packing.values()))}


def case_table(name: str, rows: Rows) -> Table:
    """A line for each subject: its figures, derived ones, and why something is missing.

    Columns without an entry are left out.
    """
    lines: dict[Subject, dict[str, Measurement]] = {}
    for row in rows:
        lines.setdefault(row.who, {})[row.quantity] = row
    if name == "alternatives":
        lines = dict(sorted(lines.items(), key=lambda line: -_speed(line[1])))
    columns: dict[str, Callable[[dict[str, Measurement]], str]] = {
        "subject": lambda line: first(line).subject,
        "settings": lambda line: first(line).settings,
        "parallel": lambda line: first(line).who.parallelism,
    }
    for row in rows:
        if row.repeats:
            columns[heading(row)] = lambda line, key=row.quantity: figure(line.get(key))  # type: ignore[misc]
    columns |= derived(name, rows)
    columns["note"] = lambda line: first(line).note
    cells = [[cell(line) for cell in columns.values()] for line in lines.values()]
    used = [place for place in range(len(columns)) if any(line[place] for line in cells)]
    header = [list(columns)[place] for place in used]
    return [header, *([line[place] for place in used] for line in cells)]


def derived(name: str, rows: Rows) -> dict[str, Callable[[dict[str, Measurement]], str]]:
    """The columns that follow from others: header, and cell from a subject's rows by quantity."""
    if name == "entry_points":
        speeds = {row.who: row for row in rows if row.quantity == SPEED}
        return {
            "scaling efficiency": lambda line: efficiency(line, speeds, first(line).subject),
            "speed per device against train.py": lambda line: efficiency(line, speeds, "train.py"),
        }
    if name == "loop_overhead":
        bare = next((row for row in rows if row.subject == BARE), None)
        return {
            "over the bare loop (%)": lambda line: (
                "" if first(line).subject == BARE else figure(overhead(first(line), bare))
            )
        }
    of = references(name, rows)
    names = {row.subject for row in of.values()}
    against = f"against {names.pop()}" if len(names) == 1 else "ratio"
    limit = next((row for row in rows if row.subject == DECODING), None)
    columns: dict[str, Callable[[dict[str, Measurement]], str]] = {
        against: lambda line: (
            "1x"
            if main(line) in of.values()
            else figure(ratio(main(line), of.get(first(line).settings)), "x")
        )
    }
    if name == "alternatives" and limit:
        columns["share of the limit"] = lambda line: (
            "" if from_pixels(first(line)) else percent(ratio(main(line), limit))
        )
    columns["epoch"] = lambda line: epoch_time(main(line))
    return columns


def references(name: str, rows: Rows) -> dict[str, Measurement]:
    """By settings, what the others are compared with: the first one, or the write-up's own way."""
    candidates = [row for row in rows if row.quantity in (SPEED, STEP_TIME) and row.repeats]
    if name == "loaders":
        return {row.settings: row for row in candidates if colour(row) == OTHERS}
    return {row.settings: row for row in reversed(candidates)}


def packing_table(rows: Rows, packing: Rows) -> Table:
    """What packing the published set takes, and after how many epochs it is paid for."""
    modes = list(dict.fromkeys(r.case.rpartition(", ")[2] for r in rows if r.quantity == SPEED))
    header = ["data", "packing (s)", "packed", "whole published set"]
    table = [[*header, *(f"paid for after (epochs), {mode}" for mode in modes)]]
    for row in packing:
        whole_s = row.median * row.epoch_size / int(row.note.split()[0]) if row.repeats else 0.0
        line = [row.case, span(row), row.note, duration(whole_s) if whole_s else "-"]
        for mode in modes:
            group = [r for r in rows if r.case == f"{row.case}, {mode}" and r.repeats]
            packed = [row.epoch_size / r.median for r in group if is_packed(r)]
            others = [row.epoch_size / r.median for r in group if not is_packed(r)]
            saved_s = min(others) - packed[0] if packed and others else 0.0
            line.append(number(whole_s / saved_s) if saved_s > 0 and whole_s else "-")
        table.append(line)
    return table


def efficiency(
    line: dict[str, Measurement], speeds: dict[Subject, Measurement], script: str
) -> str:
    """Speed per device as a share of a script's on one device."""
    row = line.get(SPEED)
    reference = speeds.get(Subject(script, settings=row.settings)) if row else None
    if row is None or reference is None or row is reference:
        return ""
    return f"{100 * row.median / row.num_devices / reference.median:.0f} %"


# Pictures


def draw_picture(path: Path, name: str, rows: Rows) -> Path:
    if name == "workers":
        return plots.curves(path, "workers or threads", worker_panels(rows))
    panels = []
    for case, group in by_case(rows).items():
        if name == "loop_overhead":
            bare = next((row for row in group if row.subject == BARE), None)
            others = [row for row in group if row is not bare]
            shown = [Bar(str(row.who), overhead(row, bare), colour(row)) for row in others]
            panels.append(Panel(case, "% of the bare loop's time per step, on top of it", shown))
            continue
        for quantity in (SPEED, STEP_TIME, WAIT, PACKING):
            chosen = [row for row in group if row.quantity == quantity]
            # What reads pixels is so much faster that no other bar could be seen beside it.
            is_split = name == "alternatives" and not all(from_pixels(row) for row in chosen)
            for part, title in (
                ([r for r in chosen if not (is_split and from_pixels(r))], case),
                ([r for r in chosen if is_split and from_pixels(r)], f"{case}, from pixels"),
            ):
                if part:
                    bars = [
                        Bar(str(r.who), r.summary if r.repeats else None, colour(r)) for r in part
                    ]
                    panels.append(Panel(title, f"{quantity} ({part[0].unit})", bars))
    return plots.bars(path, panels)


def worker_panels(rows: Rows) -> list[Panel]:
    """Seconds per epoch; of items without an epoch the speed."""
    panels = []
    for case, group in by_case(rows).items():
        curves: dict[str, list[tuple[int, Summary]]] = {}
        size = group[0].epoch_size
        for row in group:
            if row.repeats:
                median, low, high = row.summary
                y = Summary(size / median, size / high, size / low) if size else row.summary
                point = (max(row.num_workers, row.num_threads), y)
                curves.setdefault(row.subject, []).append(point)
        panels.append(Panel(case, f"s per epoch of {size:,}" if size else group[0].unit, curves))
    return panels


# What tables and pictures have in common


def by_case(rows: Rows) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return groups


def first(line: dict[str, Measurement]) -> Measurement:
    return main(line) or next(iter(line.values()))


def main(line: dict[str, Measurement]) -> Measurement | None:
    return line.get(SPEED) or line.get(STEP_TIME)


def _speed(line: dict[str, Measurement]) -> float:
    row = main(line)
    return row.median if row and row.repeats else 0.0


def heading(row: Measurement) -> str:
    return f"{row.quantity} ({row.unit})"


def figure(found: Measurement | Summary | None, unit: str = "") -> str:
    """Empty if there is none."""
    text = span(found, unit)
    return "" if text == "-" else text


def overhead(row: Measurement, bare: Measurement | None) -> Summary | None:
    """What it takes more than the bare loop, in %."""
    found = ratio(row, bare)
    return None if found is None else Summary(*(100 * (value - 1) for value in found))


def percent(found: Summary | None) -> str:
    return "" if found is None else f"{100 * found.median:.0f} %"


def colour(row: Measurement) -> str:
    """That of ours, a limit, or others."""
    if row.subject == COPIES or row.subject.startswith(("limit:", "decoding alone")):
        return LIMIT
    ours = ("loader=", "train", "python -m", list(AGREEMENTS)[-1])
    return OURS if row.subject.startswith(ours) and row.subject != SYNTHETIC else OTHERS


def is_packed(row: Measurement) -> bool:
    return row.subject == "loader=packed"


def from_pixels(row: Measurement) -> bool:
    """Whether nothing is decoded any more."""
    return is_packed(row) or row.subject.startswith("limit: copying")


def epoch_time(row: Measurement | None) -> str:
    return duration(row.epoch_size / row.median) if row and row.repeats and row.epoch_size else ""


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{number(seconds)} s"
    return f"{number(seconds / 60)} min" if seconds < 7200 else f"{number(seconds / 3600)} h"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(draw(Path(sys.argv[1])))
