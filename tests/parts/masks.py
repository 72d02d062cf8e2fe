"""Masks of images."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tasks.common import class_colours
from tests.images import (
    NUM_TRAIN,
    NUM_VAL,
    PLAIN,
    RESIZED_CROPS,
    TURNED,
    Data,
    save,
    split_folders,
    without_val,
)
from tests.parts import Trained

CLASSES, IGNORED = (0, 1, 7, 200), 255  # far apart, so that a mixture is a new one


def masks(root: Path) -> Data:
    """Masks of 1 to 32 bits, with palettes and as TIFFs; some images are WebPs."""
    data = Data(["data=masks", f"data.ignore_index={IGNORED}", *PLAIN])
    (root / "masks").mkdir(parents=True)
    types = {1: np.uint16, 4: np.int32, 5: np.bool_}
    for number in range(NUM_VAL + NUM_TRAIN):
        random, height = np.random.default_rng(number), 40 + 4 * (number % 3)
        mask = random.choice([*CLASSES, IGNORED], (height // 4, 14)).astype(np.uint8)
        mask = mask.repeat(4, axis=0).repeat(4, axis=1)
        name, form = f"{number}.{'webp' if number % 3 == 1 else 'png'}", number % 6
        if form == 5:
            mask = (mask == 1).astype(np.uint8)
        image = np.stack([mask, mask, np.full_like(mask, number)], axis=-1)
        data.inputs[name] = save(root / "images" / name, image, lossless=True)
        data.targets[name] = mask.astype(np.int64)
        stored = Image.fromarray(mask.astype(types.get(form, np.uint8)))
        options: dict[str, Any] = {"tiffinfo": {0x112: 3}} if form == 3 else {}
        if form == 2:
            stored.putpalette([(37 * i) % 256 for i in range(768)])
        elif form == 3:
            stored = stored.rotate(180)
        stored.save(root / "masks" / f"{number}.{'tif' if form in (3, 4) else 'png'}", **options)
    return data


KINDS = {"masks": masks}
SPLIT = {"masks": (partial(split_folders, masks), without_val)}
FORMS = ["masks"]
SHOWN = [
    ("masks", ["data.resize=[88,100]", "data.crop=null"]),
    ("masks", RESIZED_CROPS),
    ("masks", TURNED),
]
ENLARGED = [("masks", (120, 168), 0)]


WHOLE = ["data.crop=[40,56]", "global_batch_size=4"]
AREA = "40x56, 3 channels: images of 40-48x56, 40x56 cut (83.3% to 100.0% of the area), "
AREA += "50% flipped left-right"
DESCRIBED = [
    (masks, [*WHOLE, "data.num_classes=201"], AREA, ""),
]
TRAINED = [
    Trained(
        *("segmentation", "masks"),
        ["model=unet", "model.kwargs.num_levels=2", "loss.weights=auto"],
        folder="images",
        columns=["image"],
        values_of=lambda answer: answer.argmax(axis=-1),
        palette=class_colours(3).flatten().tolist(),
    )
]
PHOTOS = [("data=masks", None, 16, None)]
