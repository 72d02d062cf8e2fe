"""Mean average precision of detections, by torchmetrics, from a table of predict.py.

    make setup EXTRAS=boxes
    python predict.py run=outputs/shapes split=val out=outputs/shapes.csv
    python -m examples.average_precision outputs/shapes.csv shapes

The table has columns `boxes`, `labels` and `scores` with lists. The second argument is the file in
`loaders/own/` whose validation set has the targets: dicts with `boxes` (M, 4) and `labels` (M,).
"""

import csv
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torchmetrics.detection import MeanAveragePrecision

from conf.schema import DataConfig


def average_precision(rows: list[dict[str, str]], data_set: Any) -> dict[str, float]:
    """Return `map` and `map_50` of the rows of a table, in the order of the data set."""
    metric = MeanAveragePrecision()
    for number, row in enumerate(rows):
        found = {
            "boxes": torch.tensor(json.loads(row["boxes"])).view(-1, 4),
            "labels": torch.tensor(json.loads(row["labels"])).long(),
            "scores": torch.tensor(json.loads(row["scores"])),
        }
        _, target = data_set[number]
        metric.update([found], [target])
    values = metric.compute()
    return {name: float(values[name]) for name in ("map", "map_50")}


if __name__ == "__main__":
    table, name = sys.argv[1:]
    with Path(table).open() as file:
        rows = list(csv.DictReader(file))
    val_set = getattr(import_module(f"loaders.own.{name}"), name)(DataConfig(), "val").dataset
    print(json.dumps(average_precision(rows, val_set)))
