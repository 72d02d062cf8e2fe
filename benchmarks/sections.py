"""What the report says of each benchmark: conclusions, pictures and tables, from its rows alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import plots
from benchmarks.bottleneck import GIVEN, PARTS, STEP, SYNTHETIC, verdict
from benchmarks.entry_points import COPIES, GPU_USE, MEMORY, METRIC, SPEED, WAIT
from benchmarks.loop_overhead import BARE
from benchmarks.loop_overhead import OURS as OUR_LOOP
from benchmarks.plots import LIMIT, OTHERS, OURS, Bar, Line, Lines, Panel
from benchmarks.records import Measurement
from benchmarks.run import figure, number
from benchmarks.timing import Summary, ratios
from benchmarks.workers import AUTO

Rows = list[Measurement]


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[str]]
    title: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    conclusions: list[str]
    """Plain sentences that follow from the figures."""

    pictures: list[Path] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def loaders(rows: Rows, folder: Path) -> Section:
    tables, panels, gains, epochs = [], [], [], []
    for case, group in by_case(rows).items():
        ordered = sorted(group, key=lambda row: (row.settings, kind(row) == LIMIT))
        panels.append(speed_panel(case, ordered, step_label))
        reference = {row.settings: row for row in group if kind(row) == OTHERS}
        tables.append(
            Table(
                [
                    "way of loading",
                    "step",
                    "parallel",
                    f"speed ({group[0].unit})",
                    "epoch",
                    "ratio",
                ],
                [
                    [
                        *(row.subject, row.settings.removeprefix("step="), parallel(row)),
                        *(interval(row), epoch_time(row)),
                        times(ratio(row, reference.get(row.settings))),
                    ]
                    for row in ordered
                ],
                f"{case}: seconds per epoch of the published {group[0].epoch_size:,} {what(group[0])}; "
                "ratio to the write-up's way with the same step",
            )
        )
        baseline = next((row for row in group if row in reference.values() and is_full(row)), None)
        best = fastest(
            row for row in group if kind(row) == OURS and is_full(row) and not packed(row)
        )
        gain = ratio(best, baseline)
        if best and baseline and gain:
            gains.append(f"{case} {times(gain)} ({best.subject} against {baseline.subject})")
            epochs.append(f"{case} {epoch_time(best)} instead of {epoch_time(baseline)}")
    conclusions = []
    if gains:
        conclusions = [
            f"At equal cores, with resize and crop: {'; '.join(gains)}.",
            f"An epoch of the published size takes: {'; '.join(epochs)}.",
        ]
    elif best := fastest(row for row in rows if kind(row) == OURS):
        conclusions = [
            f"The fastest is {best.subject} on {best.case} with {figure(best)}.",
            "No write-up's way of loading was measured beside it.",
        ]
    picture = plots.bar_panels(folder / "loaders.png", panels)
    return Section("Loaders", conclusions or nothing(rows), [picture], tables)


def workers(rows: Rows, folder: Path) -> Section:
    panels, improvements, tables, conclusions = [], [], [], []
    for case, group in by_case(rows).items():
        sleeping = not group[0].epoch_size
        curves: dict[str, Rows] = {}
        for row in group:
            if row.repeats:
                curves.setdefault(row.subject, []).append(row)
        lines = [
            Line(
                name,
                [max(row.num_workers, row.num_threads) for row in curve],
                [summary(row) if sleeping else in_seconds(row) for row in curve],
            )
            for name, curve in curves.items()
        ]
        if sleeping and lines:
            alone = lines[0].y[0].median
            counts = [float(count) for count in range(int(max(lines[0].x)) + 1)]
            lines.append(
                straight("ideal", counts, [max(1, count) * alone for count in counts], True)
            )
        y_axis = group[0].unit if sleeping else f"seconds per epoch of {group[0].epoch_size:,}"
        panels.append(Lines(case, "workers or threads", y_axis, lines, counts=True))
        first = next((row for row in group if row.repeats), None)
        tables.append(
            Table(
                ["way of loading", "workers", "threads", f"speed ({group[0].unit})", "improvement"],
                [
                    [
                        *(row.subject, str(row.num_workers), str(row.num_threads)),
                        *(interval(row), improvement(row, first)),
                    ]
                    for row in group
                ],
                f"{case}: improvement is the share of the first line's time that is saved",
            )
        )
        if first is None:
            continue
        best = {name: fastest(curve) for name, curve in curves.items()}
        if sleeping:
            most = group[-1]
            conclusions.append(
                f"Items that only sleep: {most.num_workers} workers are "
                f"{times(ratio(most, first))} as fast as none, because workers overlap waiting "
                "whatever the number of cores."
            )
            continue
        before = fastest(curves[first.subject])
        faster = [
            row
            for row in best.values()
            if row and before and row.subject != first.subject and row.median > before.median
        ]
        said = [
            f"{row.subject} with {setting(row)} needs {improvement(row, before)} less time than that"
            for row in faster
        ]
        conclusions.append(
            f"{case}: {first.subject} saves {improvement(before, first)} of its time with "
            f"{setting(before)}; {'; '.join(said) or 'nothing else was faster'}."
        )
        for name in [name for name in curves if name.endswith(AUTO)]:
            fixed = [row for row in group if row.subject.startswith(name.removesuffix(AUTO))]
            best_fixed = fastest(row for row in fixed if row.subject != name)
            conclusions.append(
                f"{case}: {name.removesuffix(AUTO)} loader.num_workers=auto chose "
                f"{setting(best[name])}, {times(ratio(best[name], best_fixed))} the speed of the best "
                f"fixed setting ({setting(best_fixed)})."
            )
        savings = [(row, saved(ratio(row, before))) for row in faster]
        bars = [
            Bar(f"{row.subject}, {setting(row)}", *saving, kind(row))
            for row, saving in savings
            if saving
        ]
        if bars:
            title = f"{case}: against {first.subject} with {setting(before)}"
            improvements.append(Panel(title, "% of the time per epoch that is saved", bars))
    pictures = [plots.line_panels(folder / "workers.png", panels)]
    if improvements:
        pictures.append(plots.bar_panels(folder / "workers_improvement.png", improvements))
    return Section("Workers and threads", conclusions or nothing(rows), pictures, tables)


def out_of_band(rows: Rows, folder: Path) -> Section:
    packing = {row.case: row for row in rows if row.quantity == "packing"}
    speeds = [row for row in rows if row.quantity == "speed"]
    panels, tables, conclusions, curves = [], [], [], []
    for case, group in by_case(speeds).items():
        panels.append(speed_panel(case, group, lambda row: row.subject))
        name, _, mode = case.rpartition(", ")
        originals = [row for row in group if not packed(row) and row.repeats]
        ahead = next((row for row in group if packed(row) and row.repeats), None)
        original, cost = fastest(originals), packing.get(name)
        if ahead is None or original is None or cost is None or not cost.repeats:
            continue
        size = group[0].epoch_size
        packing_s = cost.median * size / int(cost.note.split()[0])
        before_s, after_s = size / original.median, size / ahead.median
        paid = packing_s / (before_s - after_s) if after_s < before_s else None
        conclusions.append(
            f"{name}, {mode}: loader=packed is {times(ratio(ahead, original))} as fast as "
            f"{original.subject}; packing takes {duration(packing_s)} for {size:,} {what(original)}, "
            + (f"paid for after {paid:.1f} epochs." if paid else "never paid for.")
        )
        reach = max(2.0, 2 * paid) if paid else 10.0
        curves.append(
            Lines(
                case,
                "epochs",
                "hours in all",
                [
                    straight(original.subject, [0, reach], [0, reach * before_s / 3600]),
                    straight(
                        "packing, then loader=packed",
                        [0, reach],
                        [packing_s / 3600, (packing_s + reach * after_s) / 3600],
                    ),
                ],
            )
        )
    tables.append(
        Table(
            ["data", "way of loading", "speed", "epoch"],
            [[row.case, row.subject, figure(row), epoch_time(row)] for row in speeds],
        )
    )
    tables.append(
        Table(
            ["data", "packing took", "packed", "whole published set"],
            [
                [
                    *(row.case, figure(row), row.note),
                    duration(row.median * row.epoch_size / int(row.note.split()[0]))
                    if row.repeats
                    else "-",
                ]
                for row in packing.values()
            ],
        )
    )
    pictures = [plots.bar_panels(folder / "out_of_band.png", panels)] if panels else []
    if curves:
        pictures.append(plots.line_panels(folder / "out_of_band_epochs.png", curves))
    return Section("Decoding ahead of time", conclusions or nothing(rows), pictures, tables)


def entry_points(rows: Rows, folder: Path) -> Section:
    panels, tables, conclusions = [], [], []
    for case, group in by_case(rows).items():
        cells = {(row.subject, row.settings, row.num_devices, row.quantity): row for row in group}
        runs = list(dict.fromkeys(key[:3] for key in cells))

        def cell(
            run: tuple[str, str, int], quantity: str, cells: dict = cells
        ) -> Measurement | None:
            return cells.get((*run, quantity))

        for quantity, title in [(SPEED, case), (WAIT, f"{case}: waiting for data")]:
            if shown := [row for run in runs if (row := cell(run, quantity))]:
                panels.append(speed_panel(title, shown, run_label))
        table = []
        for run in runs:
            script, loader, devices = run
            speed = cell(run, SPEED)
            one, base = cell((script, loader, 1), SPEED), cell(("train.py", loader, 1), SPEED)
            table.append(
                [
                    *(script, loader.removeprefix("loader="), str(devices)),
                    interval(speed),
                    quotient(speed, one, devices) if devices > 1 else "",
                    "" if script == "train.py" else quotient(speed, base, devices),
                    *(interval(cell(run, quantity)) for quantity in (WAIT, MEMORY, GPU_USE)),
                    f"{figure(metric)}" if (metric := cell(run, METRIC)) else "-",
                    *[next((row.note for row in group if row_key(row) == run and row.note), "")],
                ]
            )
        tables.append(
            Table(
                [
                    *("script", "loader", "devices", "images/s", "scaling efficiency"),
                    *("speed per device against train.py", "data wait (%)", "memory (GiB)"),
                    *("GPU use (%)", "final metric", "note"),
                ],
                table,
                f"{case}; without a GPU, a device is one CPU core",
            )
        )
        scaled = [
            f"{script} with {loader} on {devices} {quotient(cell(run, SPEED), one, devices)}"
            for run in runs
            for script, loader, devices in [run]
            if devices > 1 and (one := cell((script, loader, 1), SPEED)) and cell(run, SPEED)
        ]
        faster = [
            f"{script} {quotient(cell(run, SPEED), base, 1)}"
            for run in runs
            for script, loader, devices in [run]
            if devices == 1
            and script != "train.py"
            and (base := cell(("train.py", loader, 1), SPEED))
            and cell(run, SPEED)
        ]
        independent = [
            f"{quotient(cell(run, SPEED), base, devices)} on {devices}"
            for run in runs
            for script, loader, devices in [run]
            if script == COPIES and (base := cell(("train.py", loader, 1), SPEED))
        ]
        waits = [row for run in runs if (row := cell(run, WAIT))]
        conclusions.append(
            f"{case}: scaling efficiency {', '.join(scaled) or 'not measured'}; "
            f"speed on one device against train.py: {', '.join(faster) or 'not measured'}."
        )
        if independent:
            conclusions.append(
                "Independent runs of train.py, one on each device, show what these devices can do at "
                f"once: {', '.join(independent)}."
            )
        if waits:
            worst = max(waits, key=lambda row: row.median)
            conclusions.append(
                f"The loop waited for data at most {number(worst.median)} % of the time "
                f"({worst.subject}, {worst.settings}, {devices_of(worst)})."
            )
    pictures = [plots.bar_panels(folder / "entry_points.png", panels)] if panels else []
    return Section("Entry points", conclusions or nothing(rows), pictures, tables)


def bottleneck(rows: Rows, folder: Path) -> Section:
    stacks: dict[str, dict[str, float]] = {}
    tables, conclusions = [], []
    for case, group in by_case(rows).items():
        given = {row.quantity: row for row in group if row.subject == GIVEN}
        if STEP not in given:
            continue
        stacks[case] = {part: given[part].median for part in PARTS if given[part].median > 0}
        conclusions.append(f"{case}: {verdict(group)}.")
        synthetic = next((row for row in group if row.subject == SYNTHETIC), None)
        tables.append(
            Table(
                ["part of the step", "time (ms)"],
                [
                    *([part, interval(given[part])] for part in PARTS),
                    ["whole step", interval(given[STEP])],
                    ["whole step with loader=synthetic", interval(synthetic)],
                ],
                case,
            )
        )
        tried = [row for row in group if row.quantity == "speed"]
        if tried:
            tables.append(
                Table(
                    ["what was tried", "speed (images/s)", "ratio"],
                    [[row.subject, interval(row), times(ratio(row, tried[0]))] for row in tried],
                    case,
                )
            )
    pictures = []
    if stacks:
        pictures = [
            plots.stacked_bars(
                folder / "bottleneck.png", "Where the time of a step goes", "ms per step", stacks
            )
        ]
    return Section("Bottleneck", conclusions or nothing(rows), pictures, tables)


def loop_overhead(rows: Rows, folder: Path) -> Section:
    panels, tables, conclusions = [], [], []
    for case, group in by_case(rows).items():
        loops = {row.subject: row for row in group}
        bare = loops.get(BARE)
        cost = {name: overhead(row, bare) for name, row in loops.items() if name != BARE}
        panels.append(
            Panel(
                f"{case}: on top of forward, backward and step",
                "% of the bare loop's time per step",
                [
                    Bar(name, *(value or Summary(*3 * [float("nan")])), colour(name == OUR_LOOP))
                    for name, value in cost.items()
                ],
                reference=0.0,
            )
        )
        tables.append(
            Table(
                ["loop", "ms per step", "over the bare loop (%)", "note"],
                [
                    [row.subject, interval(row), span(cost.get(row.subject)), row.note]
                    for row in group
                ],
                case,
            )
        )
        costs = [
            f"{name} {span(found)} %" if found else f"{name} not measured"
            for name, found in cost.items()
        ]
        conclusions.append(
            f"{case}: longer than forward, backward and step alone: {', '.join(costs)}."
        )
    picture = plots.bar_panels(folder / "loop_overhead.png", panels)
    return Section("The training loop's own cost", conclusions, [picture], tables)


def alternatives(rows: Rows, folder: Path) -> Section:
    panels, tables, conclusions = [], [], []
    speeds = [row for row in rows if row.quantity == "speed"]
    pixels = {(row.case, row.subject): row for row in rows if row.quantity != "speed"}
    for case, group in by_case(speeds).items():
        ordered = sorted(group, key=lambda row: -row.median if row.repeats else 1.0)
        for title, shown in [
            (case, [row for row in ordered if not from_pixels(row)]),
            (f"{case}, decoded ahead of time", [row for row in ordered if from_pixels(row)]),
        ]:
            if shown:
                panels.append(speed_panel(title, shown, lambda row: row.subject))
        first = group[0]
        limits = {row.subject: row for row in group if kind(row) == LIMIT}
        limit = limits.get("limit: decoding alone")
        tables.append(
            Table(
                [
                    *(
                        "way of loading",
                        "parallel",
                        f"speed ({first.unit})",
                        f"against {first.subject}",
                    ),
                    *("share of the limit", "pixels (of 255)", "note"),
                ],
                [
                    [
                        *(row.subject, parallel(row), interval(row), times(ratio(row, first))),
                        "" if from_pixels(row) else percent(ratio(row, limit)),
                        number(pixels[case, row.subject].median)
                        if (case, row.subject) in pixels
                        else "",
                        row.note,
                    ]
                    for row in ordered
                ],
                f"{case}: the limit is decoding alone; pixels: mean difference from {first.subject}",
            )
        )
        ours = fastest(row for row in group if kind(row) == OURS and not packed(row))
        other = fastest(row for row in group if kind(row) == OTHERS)
        if ours and other:
            shares = [
                f", {percent(share)} of {name.removeprefix('limit: ')}"
                for name, row in limits.items()
                if "decoding" in name and (share := ratio(ours, row))
            ]
            conclusions.append(
                f"{case}: {ours.subject} is {times(ratio(ours, first))} {first.subject}"
                + "".join(shares)
                + f"; the fastest of the others, {other.subject}, is {times(ratio(other, first))}."
            )
    missing = sorted({row.subject for row in speeds if not row.repeats})
    if missing:
        conclusions.append(f"Not measured, see the notes: {', '.join(missing)}.")
    picture = plots.bar_panels(folder / "alternatives.png", panels)
    return Section("Beside all others", conclusions or nothing(rows), [picture], tables)


SECTIONS: dict[str, Callable[[Rows, Path], Section]] = {
    "alternatives": alternatives,
    "loaders": loaders,
    "workers": workers,
    "out_of_band": out_of_band,
    "entry_points": entry_points,
    "bottleneck": bottleneck,
    "loop_overhead": loop_overhead,
}


# What the sections have in common


def by_case(rows: Rows) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return groups


def row_key(row: Measurement) -> tuple[str, str, int]:
    return row.subject, row.settings, row.num_devices


def kind(row: Measurement) -> str:
    """The colour of a subject: ours, a limit, or of others."""
    if row.subject.startswith(("loader=", "train")):
        return OURS
    return LIMIT if row.subject.startswith(("limit:", "decoding alone")) else OTHERS


def colour(is_ours: bool) -> str:
    return OURS if is_ours else OTHERS


def packed(row: Measurement) -> bool:
    return row.subject == "loader=packed"


def from_pixels(row: Measurement) -> bool:
    """Whether nothing is decoded any more."""
    return packed(row) or row.subject.startswith("limit: copying")


def is_full(row: Measurement) -> bool:
    return row.settings == "step=resize+crop"


def what(row: Measurement) -> str:
    """What is counted: images or pairs."""
    return row.unit.removesuffix("/s")


def step_label(row: Measurement) -> str:
    return f"{row.subject}, {row.settings.removeprefix('step=')}"


def fastest(rows: Iterable[Measurement]) -> Measurement | None:
    return max((row for row in rows if row.repeats), key=lambda row: row.median, default=None)


def summary(row: Measurement) -> Summary:
    return Summary(row.median, row.low, row.high)


def in_seconds(row: Measurement) -> Summary:
    """Of an epoch of the published size."""
    return Summary(*(row.epoch_size / value for value in (row.median, row.high, row.low)))


def straight(label: str, x: list[float], y: list[float], dashed: bool = False) -> Line:
    """A line without uncertainty."""
    return Line(label, x, [Summary(value, value, value) for value in y], False, dashed)


def ratio(row: Measurement | None, reference: Measurement | None) -> Summary | None:
    """Ratio of two subjects that were measured side by side, round by round."""
    if row is None or reference is None or not row.repeats or not reference.repeats:
        return None
    if row.date != reference.date or row.repeats != reference.repeats:
        return None
    return ratios(row.values, reference.values)


def overhead(row: Measurement, bare: Measurement | None) -> Summary | None:
    """What it takes more than the bare loop, in %."""
    found = ratio(row, bare)
    return None if found is None else Summary(*(100 * (value - 1) for value in found))


def quotient(row: Measurement | None, reference: Measurement | None, devices: int) -> str:
    """Speed per device as a share of the reference's, of runs one after another."""
    if row is None or reference is None or not row.repeats or not reference.repeats:
        return "-"
    return f"{100 * row.median / devices / reference.median:.0f} %"


def speed_panel(title: str, rows: Rows, label: Callable[[Measurement], str]) -> Panel:
    bars = [Bar(label(row), row.median, row.low, row.high, kind(row)) for row in rows]
    unit = "% of the time" if rows[0].unit == "%" else rows[0].unit
    return Panel(title, unit, bars)


def parallel(row: Measurement) -> str:
    if row.num_workers:
        return f"{row.num_workers} workers"
    return f"{row.num_threads} threads" if row.num_threads else ""


def run_label(row: Measurement) -> str:
    return f"{row.subject}, {row.settings}, {devices_of(row)}"


def devices_of(row: Measurement) -> str:
    return f"{row.num_devices} device{'s' if row.num_devices > 1 else ''}"


def setting(row: Measurement | None) -> str:
    return (row and parallel(row)) or "no workers"


def interval(row: Measurement | None) -> str:
    """`1,840 (1,800 to 1,890)`"""
    if row is None or not row.repeats:
        return "-"
    return span(summary(row)) if row.repeats > 1 else number(row.median)


def span(values: Summary | None) -> str:
    if values is None:
        return "-"
    return f"{number(values.median)} ({number(values.low)} to {number(values.high)})"


def times(value: Summary | None) -> str:
    return "-" if value is None else f"{number(value.median)}x"


def percent(value: Summary | None) -> str:
    return "-" if value is None else f"{100 * value.median:.0f} %"


def improvement(row: Measurement | None, reference: Measurement | None) -> str:
    """Share of the reference's time that is saved."""
    found = saved(ratio(row, reference))
    return "-" if found is None else f"{found.median:.0f} %"


def saved(faster: Summary | None) -> Summary | None:
    """A ratio of speeds as the share of time that it saves, in %."""
    return None if faster is None else Summary(*(100 * (1 - 1 / value) for value in faster))


def epoch_time(row: Measurement) -> str:
    return duration(row.epoch_size / row.median) if row.repeats and row.epoch_size else "-"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{number(seconds)} s"
    return f"{number(seconds / 60)} min" if seconds < 7200 else f"{number(seconds / 3600)} h"


def nothing(rows: Rows) -> list[str]:
    """What to say of a benchmark that has no figures to compare."""
    reasons = {row.note for row in rows if row.note and not row.repeats}
    return [f"Nothing to compare: {'; '.join(sorted(reasons)) or 'too few measurements'}."]
