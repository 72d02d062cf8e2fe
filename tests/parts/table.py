"""Labels in a table."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.images import CROPPED, NUM_TRAIN, NUM_VAL, PLAIN, Data, reading, save, smooth
from tests.parts import Trained


def table(root: Path, labels: Sequence[str]) -> Data:
    """Images whose labels are in a CSV file."""
    data = Data(["data=table", "model=small_cnn", f"data.table={root}.csv", *PLAIN])
    for number in range(NUM_VAL + NUM_TRAIN):
        name = f"{number}.png"
        data.inputs[name] = save(root / name, smooth(number, 42, 44))
        data.targets[name] = labels[number % len(labels)]
    lines = ["path,label", *map(",".join, data.targets.items())]
    Path(f"{root}.csv").write_text("\n".join(lines))
    return data


def split_table(root: Path, labels: Sequence[str]) -> list[str]:
    """A table with a column of all splits; returns the overrides that read it."""
    data, path = table(root, labels), Path(f"{root}.csv")
    head, *lines = path.read_text().splitlines()
    splits = [("train", "val", "test", "train")[number % 4] for number in range(len(lines))]
    lines = [f"{line},{split}" for line, split in zip(lines, splits, strict=True)]
    path.write_text("\n".join([f"{head},split", *lines]))
    return [*data.options, *reading(root), *CROPPED]


def without_val(root: Path) -> None:
    path = Path(f"{root}.csv")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.endswith(",val")))


SEVERAL = ("cat;dog", "dog", ";", "cow; cat")
NUMBERS = [f"{number}.25" for number in range(50)]
KINDS = {
    "several labels": partial(table, labels=SEVERAL),
    "numbers": partial(table, labels=NUMBERS),
}
SPLIT = {
    "several labels": (partial(split_table, labels=SEVERAL), without_val),
    "numbers": (partial(split_table, labels=NUMBERS), without_val),
}
ENLARGED = [("several labels", (21, 22), 1)]
TRAINED = [
    Trained(
        *("multilabel", "several labels", ["model.kwargs.width=8", "loss.weights=auto"], "."),
        columns=["cat", "cow", "dog"],
    ),
    Trained(
        *("regression", "numbers", ["model.kwargs.width=8", "data.hflip=0.5"], "."),
        columns=["label"],
    ),
]
PHOTOS = [
    ("data=table", "resnet18", 16, None),
    ("experiment=finetune data=table", "resnet50", 16, None),
]
