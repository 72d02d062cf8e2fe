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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from conf.cli import parse_options, user_errors
from conf.errors import UserError

SPEED = "samples/s"


@dataclass(frozen=True)
class Row:
    """One run, or the means of several."""

    folder: str
    data: str  # data set and task; runs with the same are compared
    settings: tuple[str, ...]
    fold: int | None
    values: dict[str, float]  # metrics of the best epoch, and the speed; none before the end
    metric: str  # the one that chose this epoch
    is_error: bool  # its lowest value is the best
    deviations: dict[str, float] = field(default_factory=dict)  # of means over folds

    def score(self, key: str) -> float:
        """Return the value by which rows are sorted, the highest first; NaN if there is none."""
        metric = self.metric if key == "best" else key
        is_error = self.is_error if metric == self.metric else metric.endswith("loss")
        value = self.values.get(metric, math.nan)
        return -value if is_error else value


def read_run(folder: Path, root: Path) -> Row:
    """Read the row of the run in this folder, which may not have begun or ended."""
    config = read(folder / "config.yaml", yaml.safe_load)
    settings = read(folder / "run.json", json.loads).get("settings", {})
    summary = read(folder / "summary.json", json.loads)
    data, values = config.get("data", {}), dict(summary.get("best", {}))
    if speed := summary.get("perf/images_per_s"):
        values[SPEED] = speed
    about = [data.get("layout"), data.get("root"), data.get("table")]
    about.append(config.get("task", {}).get("name"))
    if config.get("loader", {}).get("name") == "synthetic":
        about.append("synthetic")
    return Row(
        folder=str(folder.relative_to(root)),
        data=" ".join(str(value) for value in about if value),
        settings=tuple(f"{key}={value}" for key, value in settings.items()),
        fold=data.get("fold"),
        values=values,
        metric=summary.get("best_metric", ""),
        is_error=summary.get("best_mode") == "min",
    )


def read(file: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    return load(file.read_text()) if file.exists() else {}


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
    groups = defaultdict[Any, dict[int, Row]](dict)
    for row in rows:
        if row.fold is not None and row.metric in row.values:
            others = tuple(each for each in row.settings if not each.startswith("data.fold="))
            groups[row.data, others][row.fold] = replace(row, settings=others)
    means = []
    for folds in groups.values():
        first, *more = folds.values()
        if more:
            columns = {
                x: [row.values.get(x, math.nan) for row in folds.values()] for x in first.values
            }
            values = {x: float(np.mean(column)) for x, column in columns.items()}
            deviations = {x: float(np.std(column, ddof=1)) for x, column in columns.items()}
            name = f"mean of {len(folds)} folds"
            means.append(replace(first, folder=name, values=values, deviations=deviations))
    return means


def listing(rows: list[Row], key: str) -> str:
    """Return a table of the rows, in the order of a key."""

    def place(row: Row) -> tuple[Any, ...]:
        score = row.score(key)
        return row.data, not row.deviations, math.isnan(score), -np.nan_to_num(score), row.folder

    lines = [("best", SPEED, "run", "settings")]
    for row in sorted(means_over_folds(rows) + rows, key=place):
        metric = key if key in row.values.keys() - {SPEED} else row.metric
        value = f"{metric} {row.values[metric]:.4f}" if metric in row.values else "-"
        if metric in row.deviations:
            value += f" ± {row.deviations[metric]:.4f}"
        speed = f"{row.values[SPEED]:,.0f}" if SPEED in row.values else "-"
        lines.append((value, speed, row.folder, " ".join(row.settings) or "-"))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    form = "{{:{}}}  {{:>{}}}  {{:{}}}  {{}}".format(*widths)
    return "\n".join(form.format(*line) for line in lines)


def main(arguments: Sequence[str]) -> None:
    given = [argument for argument in arguments if argument.startswith(("sort=", "-"))]
    folders = [argument for argument in arguments if argument not in given]
    options, _ = parse_options(__doc__, given, sort="best")
    if len(folders) > 1:
        raise UserError(f"tools.runs takes a folder and sort=KEY, not {' '.join(arguments)}")
    root, key = Path(*folders or ["outputs"]), options["sort"]
    rows = read_runs(root)
    if not rows:
        raise UserError(f"there are no runs below {root}; give the folder that holds the runs")
    known = {"best", SPEED, "name"}.union(*(row.values for row in rows))
    if key not in known:
        raise UserError(f"sort={key} is unknown; use one of {', '.join(sorted(known))}")
    print(listing(rows, key))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end with a reader such as `head`
    with user_errors():
        main(sys.argv[1:])
