"""List the runs of a folder: `python -m tools.runs outputs/train sort=samples/s`.

One table for each data set, number of validation samples and task, those on synthetic data last.
Each run has the best value of the metric that chooses the best epoch, training speed, folder and
changed settings, which are below if the line would be too long. What all runs of a table have set
is above it. The best run is on top; `sort=` takes `best`, `samples/s`, `name` or a metric of
`summary.json`, such as `val/loss` (smallest on top). Runs that differ in nothing but `data.fold`
have one more line, above all runs, with means and the metric's standard deviation over the folds.
Runs that did not end show no values.
"""

import json
import math
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from conf.cli import user_errors
from conf.credentials import masked
from conf.errors import UserError, counted

MAX_WIDTH = 110
"""Of a run's columns; if they are wider, the settings are below."""


@dataclass(frozen=True)
class Row:
    """One run."""

    folder: str
    data: str = ""
    """Data set and task, as on a command line; empty if the run has not started."""
    num_val_samples: int = 0
    """0: unknown."""
    metric: str = ""
    """The metric that chooses the best epoch; empty if the run did not end."""
    is_error: bool = False
    """The lowest value of this metric is the best."""
    best: dict[str, float] = field(default_factory=dict)
    """The metrics of that epoch."""
    images_per_s: float | None = None
    settings: tuple[str, ...] = ()
    fold: int | None = None
    deviation: dict[str, float] = field(default_factory=dict)
    """Of the metrics over the folds, if they are means."""

    def score(self, metric: str) -> float | None:
        """Return the value of a metric, by which higher is better; None if the run has none."""
        value = self.best.get(metric)
        is_error = self.is_error if metric == self.metric else metric.endswith("loss")
        return -value if value is not None and is_error else value


def read_run(folder: Path, root: Path) -> Row:
    """Read the row of the run in this folder."""
    config = read_file(folder / "config.yaml", yaml.safe_load)
    start, summary = (read_file(folder / f"{name}.json", json.loads) for name in ("run", "summary"))
    data, task = config.get("data", {}), config.get("task", {})
    about = {"data": data.get("layout"), "data.root": data.get("root"), "task": task.get("name")}
    about |= {"data.table": data.get("table")}
    if (fold := data.get("fold")) is not None:
        about["data.num_folds"] = data.get("num_folds")
    if config.get("loader", {}).get("name") == "synthetic":
        about["loader"] = "synthetic"
    best = summary.get("best", {})
    return Row(
        folder=str(folder.relative_to(root)),
        data=" ".join(as_overrides({key: value for key, value in about.items() if value})),
        num_val_samples=start.get("val_samples", 0) if fold is None else 0,  # folds differ by one
        metric=summary.get("best_metric", "") if best else "",
        is_error=summary.get("best_mode") == "min",
        best=best,
        images_per_s=summary.get("perf/images_per_s"),
        settings=as_overrides(start.get("settings", {})),
        fold=fold,
    )


def read_runs(folders: Iterable[Path], root: Path) -> list[Row]:
    """Read the rows of runs, but for those whose files are damaged, which are named."""
    rows = []
    for folder in folders:
        try:
            rows.append(read_run(folder, root))
        except UserError as error:
            print(error, file=sys.stderr)
    return rows


def read_file(path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    """Read a file of a run; an empty dictionary if it is not there yet."""
    try:
        return dict(load(path.read_text())) if path.exists() else {}
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is damaged: {reason}; move the run elsewhere") from error


def as_overrides(settings: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={masked(value)}" for key, value in settings.items())


def listing(rows: list[Row], key: str) -> str:
    """Return the rows in order, a table for all that can be compared."""

    def group(row: Row) -> tuple[bool, str, int]:
        return row.data.endswith("loader=synthetic"), row.data, row.num_val_samples

    tables = []
    for (_, data, count), some in groupby(sorted(rows, key=group), group):
        title = f"{data}: {counted(count, 'validation sample')}" if count else data
        found = list(some)
        ordered = in_order(means_over_folds(found), key) + in_order(found, key)
        tables.append("\n".join([title] * bool(title) + table(ordered, key)))
    return "\n\n".join(tables)


def means_over_folds(rows: list[Row]) -> list[Row]:
    """Return a row for all runs that differ in their fold alone, with the means of their values."""
    by_settings: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        if row.fold is not None and row.best:
            others = tuple(each for each in row.settings if not each.startswith("data.fold="))
            by_settings.setdefault(others, {})[row.fold] = row
    means = []
    for settings, folds in by_settings.items():
        if len(some := list(folds.values())) < 2:
            continue
        values = {name: [row.best.get(name, math.nan) for row in some] for name in some[0].best}
        mean_row = replace(
            some[0],
            folder=f"mean of {len(some)} folds",
            best={name: float(np.mean(of_folds)) for name, of_folds in values.items()},
            deviation={name: float(np.std(of_folds, ddof=1)) for name, of_folds in values.items()},
            images_per_s=float(np.mean([row.images_per_s or 0 for row in some])),
            settings=settings,
        )
        means.append(mean_row)
    return means


def in_order(rows: list[Row], key: str) -> list[Row]:
    """Sort the rows, the best first and those without a value last; with several metrics, one after
    the other."""

    def place(row: Row) -> tuple[Any, ...]:
        metric = row.metric if key == "best" else key
        value = row.images_per_s if key == "samples/s" else row.score(metric)
        if value is None or math.isnan(value):
            return True, "", 0, row.folder
        return False, metric, -value, row.folder

    return sorted(rows, key=(lambda row: row.folder) if key == "name" else place)


def table(rows: list[Row], key: str) -> list[str]:
    first = rows[0].settings if len(rows) > 1 else ()
    shared = [setting for setting in first if all(setting in row.settings for row in rows)]
    shown = [("best", "samples/s", "run", "settings")]
    for row in rows:
        metric = key if "/" in key and key != "samples/s" else row.metric
        value = f"{metric} {row.best[metric]:.4f}" if metric in row.best else "-"
        value += f" ± {row.deviation[metric]:.4f}" if metric in row.deviation else ""
        speed = f"{row.images_per_s:,.0f}" if row.images_per_s else "-"
        settings = " ".join(setting for setting in row.settings if setting not in shared)
        shown.append((value, speed, row.folder, settings or "-"))
    widths = [max(len(cells[column]) for cells in shown) for column in range(4)]
    gap = "  " if sum(widths) <= MAX_WIDTH else "\n    "
    return [" ".join(["all:", *shared])] * bool(shared) + [
        f"{best:{widths[0]}}  {speed:>{widths[1]}}  {run:{widths[2]}}{gap}{settings}"
        for best, speed, run, settings in shown
    ]


def main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    folders = [argument for argument in arguments if not argument.startswith("sort=")]
    keys = [argument.removeprefix("sort=") for argument in arguments if argument not in folders]
    root, key = Path([*folders, "outputs"][0]), [*keys, "best"][0]
    if len(folders) > 1:
        raise UserError(f"tools.runs takes a folder and sort=KEY, not {' '.join(arguments)}")
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give the folder that holds the runs")
    rows = read_runs([file.parent for file in root.rglob("config.yaml")], root)
    if not rows:
        raise UserError(f"there are no runs below {root}; give the folder that holds the runs")
    known = {"best", "samples/s", "name"}.union(*(row.best for row in rows))
    if key not in known:
        raise UserError(f"sort={key} is unknown; use one of {', '.join(sorted(known))}")
    print(listing(rows, key))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end with a reader such as `head`
    with user_errors():
        main(sys.argv[1:])
