"""Speed of augmenting batches, compared with torchvision's v2 transforms with the same settings.

The template draws parameters for each image and augments the whole batch on the device, as
`BatchTransform` does. Torchvision transforms each image, as in a dataset, or the whole batch with
the same parameters. On a CPU all use one thread, as the loader's transform thread does.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.interleave import CountItems, Workload
from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import make_config
from loaders.augment import AUGMENTATIONS, parts
from loaders.index import Index
from loaders.plan import PlanSampler
from loaders.targets import Labels

BATCH_SIZE, SIZE, NUM_CLASSES = 64, 224, 1000
NUM_SAMPLES = 10**6
OURS = "loaders.augment"


def _randaugment(v2: Any) -> Any:
    """Transform of two random pixel operations of RandAugment, with magnitude 9 of 31."""
    operations = [
        *(nn.Identity(), v2.ColorJitter(brightness=0.27), v2.ColorJitter(contrast=0.27)),
        *(v2.ColorJitter(saturation=0.27), v2.RandomAdjustSharpness(1.27, p=1)),
        *(v2.RandomPosterize(7, p=1), v2.RandomSolarize(181, p=1)),
        *(v2.RandomAutocontrast(p=1), v2.RandomEqualize(p=1)),
    ]
    return v2.Compose([v2.RandomChoice(operations), v2.RandomChoice(operations)])


# By the template's overrides: the transform of torchvision's v2 module with the same settings.
TORCHVISION_TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "data.colour_jitter=[0.4,0.4,0.4]": lambda v2: v2.ColorJitter(0.4, 0.4, 0.4),
    "data.randaugment=[2,9]": _randaugment,
    "data.rotation=15 data.random_scale=[0.8,1.25]": lambda v2: v2.RandomAffine(
        15, scale=(0.8, 1.25), interpolation=v2.InterpolationMode.BILINEAR
    ),
    "data.random_erasing=0.25": lambda v2: v2.RandomErasing(0.25),
    "data.mixup=0.2": lambda v2: v2.MixUp(alpha=0.2, num_classes=NUM_CLASSES),
    "data.cutmix=1": lambda v2: v2.CutMix(alpha=1.0, num_classes=NUM_CLASSES),
}
BATCH_ONLY = ("data.mixup=0.2", "data.cutmix=1")


def main(run: Run, overrides: Sequence[str] = tuple(TORCHVISION_TRANSFORMS)) -> None:
    for override in overrides:
        workloads: dict[Subject, Workload] = {
            Subject(OURS): partial(run_ours, override, run.device)
        }
        modes = {"torchvision v2, image by image": False, "torchvision v2, one draw for all": True}
        for name, whole_batch in modes.items():
            if whole_batch or override not in BATCH_ONLY:
                workloads[Subject(name)] = partial(
                    run_torchvision, override, run.device, whole_batch
                )
        run.compare("augmentations", override, workloads)


def run_ours(override: str, device: torch.device, count_items: CountItems) -> None:
    """Plan and augment batch after batch with the template's augmentations."""
    torch.set_num_threads(1)
    cfg = make_config(*override.split(), f"global_batch_size={BATCH_SIZE}")
    classes = np.broadcast_to(np.int64(0), NUM_SAMPLES)
    target = Labels(classes, tuple(map(str, range(NUM_CLASSES))))
    sizes = np.broadcast_to(np.array([SIZE, SIZE], np.int32), (NUM_SAMPLES, 2))
    index = Index(name="photos/train", sizes=sizes, channels=3, target=target)
    sampler = PlanSampler(index, cfg, 0, 1, train=True)
    images, labels = _random_batch(device)
    original = images.clone()
    active = [augmentation for augmentation in AUGMENTATIONS if augmentation.active_keys(cfg.data)]
    for start in itertools.cycle(range(0, NUM_SAMPLES - BATCH_SIZE, BATCH_SIZE)):
        if (
            start % (16 * BATCH_SIZE) == 0
        ):  # mixing them again and again would make all images alike
            images.copy_(original)
        rows = sampler.plan(np.arange(start, start + BATCH_SIZE))
        for augmentation in active:
            for part in parts(images):
                augmentation.apply(images[part].clone(), rows[part])
            augmentation.apply_to_both(images, labels, rows, target)
        count_items(1)


def run_torchvision(
    override: str, device: torch.device, whole_batch: bool, count_items: CountItems
) -> None:
    """Apply the torchvision transform to one batch, image by image or as a whole, repeatedly."""
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    transform = TORCHVISION_TRANSFORMS[override](v2)
    images, labels = _random_batch(device)
    if "randaugment" in override:  # torchvision implements it for uint8 only
        images = (255 * images).to(torch.uint8)
    while True:
        if override in BATCH_ONLY:
            transform(images, labels)
        elif whole_batch:
            transform(images)
        else:
            torch.stack([transform(image) for image in images])
        count_items(1)


def _random_batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    images = torch.rand((BATCH_SIZE, 3, SIZE, SIZE), generator=random)
    labels = torch.randint(NUM_CLASSES, (BATCH_SIZE,), generator=random)
    return images.to(device), labels.to(device)
