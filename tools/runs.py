"""List the runs of a folder: `python -m tools.runs outputs/train sort=samples/s`.

Each line has the best value of the metric that chooses the best epoch, training speed, folder and
changed settings. Runs on the same data stand together, the best first; `sort=` takes `best`,
`samples/s`, `name` or a metric of `summary.json`, such as `val/loss` (smallest first). Runs that
differ in nothing but `data.fold` have one more line, above the others, with means and the metric's
standard deviation over the folds. Runs that did not end show no values.
"""

import json
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from conf.cli import user_errors
from conf.errors import UserError

HEADER = ("best", "samples/s", "run", "settings")


@dataclass(frozen=True)
class Row:
    """One run, or the means of several."""

    folder: str
    data: str
    """Data set and task; runs with the same are compared."""
    metric: str
    """The metric that chooses the best epoch; empty if the run did not end."""
    is_error: bool
    """The lowest value of this metric is the best."""
    best: dict[str, float]
    """The metrics of that epoch."""
    images_per_s: float
    settings: tuple[str, ...]
    fold: int | None
    deviation: dict[str, float] = field(default_factory=dict)
    """Of the metrics over the folds, if they are means."""

    def score(self, metric: str) -> float:
        """Return the value of a metric, by which higher is better; NaN if the run has none."""
        value = self.best.get(metric, math.nan)
        is_error = self.is_error if metric == self.metric else metric.endswith("loss")
        return -value if is_error else value


def read_run(folder: Path, root: Path) -> Row:
    """Read the row of the run in this folder."""
    contents: list[dict[str, Any]] = []
    files = {"config.yaml": yaml.safe_load, "run.json": json.loads, "summary.json": json.loads}
    for name, load in files.items():  # one may not be there yet
        contents.append(load((folder / name).read_text()) if (folder / name).exists() else {})
    config, start, summary = contents
    data = config.get("data", {})
    about = [data.get("layout"), data.get("root"), data.get("table")]
    about.append(config.get("task", {}).get("name"))
    if config.get("loader", {}).get("name") == "synthetic":
        about.append("synthetic")
    best = summary.get("best", {})
    return Row(
        folder=str(folder.relative_to(root)),
        data=" ".join(str(value) for value in about if value),
        metric=summary.get("best_metric", "") if best else "",
        is_error=summary.get("best_mode") == "min",
        best=best,
        images_per_s=summary.get("perf/images_per_s") or math.nan,
        settings=tuple(f"{key}={value}" for key, value in start.get("settings", {}).items()),
        fold=data.get("fold"),
    )


def read_runs(root: Path) -> list[Row]:
    """Read the rows of all runs below a folder, but for damaged ones, which are named."""
    rows = []
    for file in root.rglob("config.yaml"):
        try:
            rows.append(read_run(file.parent, root))
        except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
            reason = str(error).partition("\n")[0]
            print(f"{file.parent} is left out: it is damaged ({reason})", file=sys.stderr)
    return rows


def means_over_folds(rows: list[Row]) -> list[Row]:
    """Return a row for all runs that differ in their fold alone, with the means of their values."""
    groups: dict[tuple[str, tuple[str, ...]], dict[int, Row]] = {}
    for row in rows:
        if row.fold is not None and row.best:
            others = tuple(each for each in row.settings if not each.startswith("data.fold="))
            groups.setdefault((row.data, others), {})[row.fold] = row
    means = []
    for (_, settings), folds in groups.items():
        some = list(folds.values())
        if len(some) > 1:
            values = {name: [row.best.get(name, math.nan) for row in some] for name in some[0].best}
            mean = replace(
                some[0],
                folder=f"mean of {len(some)} folds",
                best={name: float(np.mean(of_folds)) for name, of_folds in values.items()},
                deviation={
                    name: float(np.std(of_folds, ddof=1)) for name, of_folds in values.items()
                },
                images_per_s=float(np.mean([row.images_per_s for row in some])),
                settings=settings,
            )
            means.append(mean)
    return means


def listing(rows: list[Row], key: str) -> str:
    """Return a table of the rows, in the order of a key."""

    def place(row: Row) -> tuple[Any, ...]:
        value = row.score(row.metric if key == "best" else key)
        if key in ("samples/s", "name"):
            value = row.images_per_s if key == "samples/s" else 0.0
        is_unknown = math.isnan(value)
        return row.data, not row.deviation, is_unknown, 0 if is_unknown else -value, row.folder

    lines = [HEADER]
    for row in sorted(means_over_folds(rows) + rows, key=place):
        metric = key if key in row.best else row.metric
        value = f"{metric} {row.best[metric]:.4f}" if metric in row.best else "-"
        if metric in row.deviation:
            value += f" ± {row.deviation[metric]:.4f}"
        speed = "-" if math.isnan(row.images_per_s) else f"{row.images_per_s:,.0f}"
        lines.append((value, speed, row.folder, " ".join(row.settings) or "-"))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        f"{best:{widths[0]}}  {speed:>{widths[1]}}  {run:{widths[2]}}  {settings}"
        for best, speed, run, settings in lines
    )


def main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    folders = [argument for argument in arguments if not argument.startswith("sort=")]
    keys = [argument.removeprefix("sort=") for argument in arguments if argument not in folders]
    if len(folders) > 1:
        raise UserError(f"tools.runs takes a folder and sort=KEY, not {' '.join(arguments)}")
    root = Path(folders[0] if folders else "outputs")
    key = keys[0] if keys else "best"
    rows = read_runs(root)
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
