"""List the runs of a folder: `python runs.py`, `python runs.py outputs/train sort=images/s`.

A line a run: its folder, its best value of the metric that chooses the best epoch, its speed in training and
the settings that were changed. The best is on top; `sort=` takes `best`, `images/s`, `name` or any metric of
`summary.json`, such as `val/loss`, whose smallest value is on top. A run that did not end shows no values.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from conf.mistakes import Mistake, end_in_a_few_lines


class Row(NamedTuple):
    """What is told of a run."""

    folder: str
    metric: str
    """Of the best epoch; empty if the run did not end."""
    best: dict[str, float]
    """The metrics of that epoch."""
    images_per_s: float | None
    settings: str


def read_run(folder: Path, root: Path) -> Row:
    """The row of the run in this folder."""
    start, summary = (read_json(folder / name) for name in ("run.json", "summary.json"))
    best = summary.get("best", {})
    settings = " ".join(f"{key}={value}" for key, value in start.get("settings", {}).items())
    return Row(
        folder=str(folder.relative_to(root)),
        metric=summary.get("best_metric", "") if best else "",
        best=best,
        images_per_s=summary.get("perf/images_per_s"),
        settings=settings or "-",
    )


def read_json(file: Path) -> dict[str, Any]:
    """Nothing if there is no such file, or only a part of it."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def in_order(rows: list[Row], key: str) -> list[Row]:
    """The rows, the best first and those without a value last; of several metrics, one after the other."""

    def place(row: Row) -> tuple[Any, ...]:
        if key == "best":
            value = row.best.get(row.metric)
            return value is None, row.metric, -(value or 0), row.folder
        if key == "images/s":
            return row.images_per_s is None, -(row.images_per_s or 0), row.folder
        value = row.best.get(key)
        return value is None, (value or 0) * (1 if key.endswith("loss") else -1), row.folder

    if key == "name":
        return sorted(rows)
    return sorted(rows, key=place)


def table(rows: list[Row], key: str) -> str:
    shown = [("run", "best", "images/s", "settings")]
    for row in rows:
        metric = key if "/" in key and key != "images/s" else row.metric
        value = f"{metric} {row.best[metric]:.4f}" if metric in row.best else "-"
        speed = "-" if row.images_per_s is None else f"{row.images_per_s:,.0f}"
        shown.append((row.folder, value, speed, row.settings))
    widths = [max(len(cells[column]) for cells in shown) for column in range(3)]
    return "\n".join(
        f"{run:{widths[0]}}  {best:{widths[1]}}  {speed:>{widths[2]}}  {settings}"
        for run, best, speed, settings in shown
    )


def main() -> None:
    options = [argument for argument in sys.argv[1:] if "=" in argument]
    folders = [argument for argument in sys.argv[1:] if "=" not in argument]
    unknown = [option for option in options if not option.startswith("sort=")]
    if unknown or len(folders) > 1 or any(folder.startswith("-") for folder in folders):
        raise Mistake(f"runs.py takes a folder and sort=KEY, not {' '.join(sys.argv[1:])}")
    root = Path(folders[0] if folders else "outputs")
    key = options[-1].removeprefix("sort=") if options else "best"
    if not root.is_dir():
        raise Mistake(f"{root} is not a folder; give the folder that holds the runs")
    rows = [read_run(file.parent, root) for file in root.rglob("config.yaml")]
    if not rows:
        raise Mistake(f"there are no runs below {root}; give the folder that holds the runs")
    known = {"best", "images/s", "name"}.union(*(row.best for row in rows))
    if key not in known:
        raise Mistake(f"sort={key} is unknown; use one of {', '.join(sorted(known))}")
    print(table(in_order(rows, key), key))


if __name__ == "__main__":
    end_in_a_few_lines()
    main()
