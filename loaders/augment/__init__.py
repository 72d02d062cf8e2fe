"""Random changes of training samples: one object per augmentation, all of them in `AUGMENTATIONS`.

An augmentation names the columns that it adds to a row of the plan, and draws them. Every backend
cuts out the rectangle; all else is done with batches on the device, whatever the backend: flips,
`apply` on images in [0, 1], and `apply_to_both` on inputs and targets as the model sees them.
"""

from conf.schema import DataConfig
from loaders.augment.base import Augmentation, Random, to_device
from loaders.augment.colour import OPERATIONS, ColourJitter, RandAugment
from loaders.augment.mixing import Mixing
from loaders.augment.spatial import Affine, Flips, RandomCrop, RandomErasing

AUGMENTATIONS: tuple[Augmentation, ...] = (
    RandomCrop(),
    Flips(),
    ColourJitter(),
    RandAugment(),
    Affine(),
    RandomErasing(),
    Mixing(),
)


def active_augmentations(data: DataConfig) -> tuple[Augmentation, ...]:
    """Return the augmentations that the configuration switches on, in the order they act in."""
    off = DataConfig()
    return tuple(
        augmentation
        for augmentation in AUGMENTATIONS
        if any(getattr(data, key) != getattr(off, key) for key in augmentation.keys)
    )
