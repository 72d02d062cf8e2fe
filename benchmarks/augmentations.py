"""What augmentations of a finished batch cost, beside torchvision's v2 transforms with the same settings.

Ours draw for each image and act on the whole batch, as `BatchTransform` has them do on the device. Torchvision's
transforms are called image by image, as a data set calls them, or on the whole batch, where one draw is for
all images. On a CPU with one thread, which is what the loader's finishing thread has.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import make_config
from benchmarks.turns import Count, Program
from loaders.augment import AUGMENTATIONS
from loaders.index import Index
from loaders.memory import parts
from loaders.plan import PlanSampler
from loaders.targets import Labels

BATCH_SIZE, SIZE, NUM_CLASSES = 64, 224, 1000
NUM_SAMPLES = 10**6
OURS = "loaders.augment"


def _randaugment(v2: Any) -> Any:
    """Two operations of RandAugment that act on pixels, at magnitude 9 of 31."""
    operations = [
        *(nn.Identity(), v2.ColorJitter(brightness=0.27), v2.ColorJitter(contrast=0.27)),
        *(v2.ColorJitter(saturation=0.27), v2.RandomAdjustSharpness(1.27, p=1)),
        *(v2.RandomPosterize(7, p=1), v2.RandomSolarize(181, p=1)),
        *(v2.RandomAutocontrast(p=1), v2.RandomEqualize(p=1)),
    ]
    return v2.Compose([v2.RandomChoice(operations), v2.RandomChoice(operations)])


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


def main(run: Run, kinds: Sequence[str] = tuple(KINDS)) -> None:
    for kind in kinds:
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
    classes = np.broadcast_to(np.int64(0), NUM_SAMPLES)
    target = Labels(classes, tuple(map(str, range(NUM_CLASSES))))
    sizes = np.broadcast_to(np.array([SIZE, SIZE], np.int32), (NUM_SAMPLES, 2))
    index = Index(name="photos/train", sizes=sizes, channels=3, target=target)
    sampler = PlanSampler(index, data, 0, BATCH_SIZE, 0, 1, train=True)
    images, labels = _batch(device)
    original = images.clone()
    active = [augmentation for augmentation in AUGMENTATIONS if augmentation.active_keys(data)]
    for start in itertools.cycle(range(0, NUM_SAMPLES - BATCH_SIZE, BATCH_SIZE)):
        if start % (16 * BATCH_SIZE) == 0:  # before little of them is left
            images.copy_(original)
        rows = sampler.plan(np.arange(start, start + BATCH_SIZE))
        for augmentation in active:
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
