"""What augmentations of a finished batch cost, beside torchvision's v2 transforms with the same settings.

Ours draw for each image and act on the whole batch, as `Pixels` has them do on the device. Torchvision's
transforms are called image by image, as a data set calls them, or on the whole batch, where one draw is for
all images. On a CPU with one thread, which is what the loader's finishing thread has.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import make_config
from benchmarks.turns import Count, Program
from loaders.augment import AUGMENTATIONS
from loaders.augmentation import parts
from loaders.plan import neutral_rows
from loaders.randomness import key_of, uniform
from loaders.targets import Labels

BATCH_SIZE, SIZE, NUM_CLASSES = 64, 224, 1000
OURS = "loaders.augment"
PIXELWISE = (
    *("Identity", "Brightness", "Contrast", "Color", "Sharpness", "Posterize", "Solarize"),
    *("AutoContrast", "Equalize"),
)


def _randaugment(v2: Any) -> Any:
    transform = v2.RandAugment(2, 9)
    space = transform._AUGMENTATION_SPACE
    transform._AUGMENTATION_SPACE = {name: space[name] for name in PIXELWISE}
    return transform


# by what is set: the same as a transform of torchvision's v2 module
KINDS: dict[str, Callable[[Any], Any]] = {
    "data.colour_jitter=[0.4,0.4,0.4]": lambda v2: v2.ColorJitter(0.4, 0.4, 0.4),
    "data.randaugment=[2,9]": _randaugment,
    "data.gaussian_blur=[0.5,0.1,2]": lambda v2: v2.RandomApply([v2.GaussianBlur(13, (0.1, 2.0))]),
    "data.rotation=15 data.random_scale=[0.8,1.25]": lambda v2: v2.RandomAffine(
        15, scale=(0.8, 1.25), interpolation=v2.InterpolationMode.BILINEAR
    ),
    "data.random_erasing=0.25": lambda v2: v2.RandomErasing(0.25),
    "data.mixup=0.2": lambda v2: v2.MixUp(alpha=0.2, num_classes=NUM_CLASSES),
    "data.cutmix=1": lambda v2: v2.CutMix(alpha=1.0, num_classes=NUM_CLASSES),
}
OF_BATCHES = ("data.mixup=0.2", "data.cutmix=1")


def main(run: Run) -> None:
    for kind in KINDS:
        programs: dict[Subject, Program] = {Subject(OURS): partial(ours, kind, run.device)}
        ways = {"torchvision v2, image by image": False, "torchvision v2, one draw for all": True}
        for name, at_once in ways.items():
            if at_once or kind not in OF_BATCHES:
                programs[Subject(name)] = partial(torchvisions, kind, run.device, at_once)
        run.compare("augmentations", kind, programs)


def ours(kind: str, device: torch.device, count: Count) -> None:
    """Draw rows and apply them, batch after batch."""
    torch.set_num_threads(1)
    data = make_config(*kind.split()).data
    target = Labels(np.zeros(0), tuple(map(str, range(NUM_CLASSES))))
    images, labels = _batch(device)
    original = images.clone()
    active = [augmentation for augmentation in AUGMENTATIONS if augmentation.active_keys(data)]
    position = 0
    while True:
        positions = np.arange(position, position + BATCH_SIZE)
        position += BATCH_SIZE
        if position % (16 * BATCH_SIZE) == 0:  # before little of them is left
            images.copy_(original)

        def random(column: str, num: int, positions: np.ndarray = positions) -> np.ndarray:
            return uniform(positions, key_of(column, 0), num)

        rows = neutral_rows(positions)
        for augmentation in active:
            augmentation.draw(rows, np.full((BATCH_SIZE, 2), SIZE), data, random)
            for part in parts(images):
                augmentation.apply(images[part].clone(), rows[part])
            augmentation.apply_to_both(images, labels, rows, target)
        count(1)


def torchvisions(kind: str, device: torch.device, at_once: bool, count: Count) -> None:
    """Apply a transform to each image, or to the batch, over and over."""
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    transform = KINDS[kind](v2)
    images, labels = _batch(device)
    if "randaugment" in kind:  # which torchvision has for bytes
        images = (255 * images).to(torch.uint8)
    while True:
        if kind in OF_BATCHES:
            transform(images, labels)
        elif at_once:
            transform(images)
        else:
            torch.stack([transform(image) for image in images])
        count(1)


def _batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    images = torch.rand((BATCH_SIZE, 3, SIZE, SIZE), generator=random)
    labels = torch.randint(NUM_CLASSES, (BATCH_SIZE,), generator=random)
    return images.to(device), labels.to(device)
