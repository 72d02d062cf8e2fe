"""Pairs of images."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np

from tests.formats import write_all
from tests.images import CROPPED, NUM_TRAIN, NUM_VAL, Data, reading, save, smooth, without_val


def pairs(root: Path, factor: int = 1) -> Data:
    """Pairs whose targets are `factor` times as large as the inputs."""
    data = Data(["data=pairs", "data.input_dir=blurry", "data.target_dir=sharp"])
    data.options += ["data.value_range=[0,1]"]
    for number in range(NUM_VAL + NUM_TRAIN):
        folder = root / ("test" if number < NUM_VAL else "train")
        name, height = f"{number}.png", 41 + number % 3
        image = smooth(number, height, 50)
        target = smooth(number + 50, factor * height, factor * 50)
        data.inputs[name] = save(folder / f"blurry/scene{number % 2}" / name, image)
        data.targets[name] = save(folder / f"sharp/scene{number % 2}" / name, target)
    return data


def pairs_of_all_formats(root: Path) -> Data:
    """Each target is a copy of its input."""
    data = Data(["data=pairs", "data.value_range=[0,1]"])
    written = write_all(root / "input", background=[255, 255, 255])
    for name in [*written][NUM_VAL + NUM_TRAIN :]:
        (root / "input" / name).unlink()
    for name in [*written][: NUM_VAL + NUM_TRAIN]:
        data.inputs[name] = data.targets[name] = written[name] / np.float32(255)
    shutil.copytree(root / "input", root / "target")
    return data


def split_pairs(root: Path) -> list[str]:
    """Pairs in all splits; returns the overrides that read them."""
    data = pairs(root)
    shutil.copytree(root / "test", root / "val")
    return [*data.options, *reading(root), *CROPPED]


KINDS = {
    "pairs": pairs,
    "pairs, targets twice as large": partial(pairs, factor=2),
    "pairs of all formats": pairs_of_all_formats,
}
SPLIT = {"pairs": (split_pairs, without_val)}
FORMS = ["pairs"]
SHOWN = [("pairs, targets twice as large", ["data.resize=36"])]
LAYOUTS_WITH_SPLITS = [("data=pairs", 1)]
UNPAIRED = {"target/99.png": 8} | {f"input/{number:02d}.png": 8 for number in range(13)}
PAIRED = {"input/a.png": 8, "target/a.png": 8, "input/b.png": 8, "target/b.png": 9}
BAD_FOLDERS = [
    ("data=pairs", UNPAIRED, ["14 images", "partner", "01.png", "8 more"]),
    ("data=pairs", PAIRED, ["1 pair ", "b.png (8x8)", "(8x9)"]),
]
MISTAKES = [("train.py data=pairs data.root=FOLDER/photos", "FOLDER/photos/input is not a folder")]


CUT = ["data.crop=16", "global_batch_size=4"]
AREA = "16x16, 3 channels: images of 41-43x50, 16x16 cut (11.9% to 12.5% of the area), "
AREA += "50% flipped left-right, 50% flipped upside-down"
WARNED = "data.crop=16 with data.resize=null shows 12.2%"
DESCRIBED = [(pairs, CUT, AREA, ""), (pairs, [*CUT, "data.random_crop=false"], AREA, WARNED)]
PHOTOS = [("data=pairs", None, 16, None)]
