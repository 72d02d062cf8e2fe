"""What training does to samples at random: one object per augmentation, all of them in `AUGMENTATIONS`.

An augmentation names the columns that it adds to a row of the plan with their neutral values, which
leave the image as it is, and draws them. A rectangle and flips are executed by every backend; all else
acts on finished batches, on the device and once for all backends: `apply` on pictures in [0, 1],
`apply_to_both` on inputs and targets as the model sees them.
"""

import numpy as np
from torch import Tensor

from conf.schema import DataConfig
from loaders.augment_both import Affine, GaussianBlur, Mixing, RandomErasing
from loaders.augmentation import Augmentation, Random, on_device
from loaders.randaugment import RandAugment, brightness, colour, contrast


class RandomCrop(Augmentation):
    """A rectangle of the crop's size anywhere in the image."""

    keys = ("random_crop",)

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        if data.random_crop:
            _place(rows, sizes, random)


class RandomResizedCrop(Augmentation):
    """A rectangle anywhere with a random share of the area and a random aspect ratio (Szegedy et al.
    2015, "Going deeper with convolutions", section 6): ten tries, then the largest square."""

    keys = ("random_resized_crop",)

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        if data.random_resized_crop is None:
            return
        low, high = data.random_resized_crop
        shares, ratios = np.split(random("height, width", 20), 2, axis=1)
        area = sizes.prod(axis=1)[:, None] * (low + (high - low) * shares)
        ratio = np.exp(np.log(4 / 3) * (2 * ratios - 1))
        shapes = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(int)
        fits = ((shapes > 0) & (shapes <= sizes[:, None])).all(axis=2)
        first = shapes[np.arange(len(rows)), fits.argmax(axis=1)]
        square = sizes.min(axis=1, keepdims=True)
        chosen = np.where(fits.any(axis=1, keepdims=True), first, square)
        rows["height"], rows["width"] = chosen.T
        _place(rows, sizes, random)


def _place(rows: np.ndarray, sizes: np.ndarray, random: Random) -> None:
    """Move the rows' rectangles to where chance wants them, every position being as likely."""
    for start, length, whole in [("y", "height", sizes[:, 0]), ("x", "width", sizes[:, 1])]:
        rows[start] = random(start, 1)[:, 0] * (whole - rows[length] + 1)


class Flips(Augmentation):
    """Left and right, or upper and lower side exchanged."""

    keys = ("hflip", "vflip")
    columns = (("hflip", "?", False), ("vflip", "?", False))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        rows["hflip"] = random("hflip", 1)[:, 0] < data.hflip
        rows["vflip"] = random("vflip", 1)[:, 0] < data.vflip


class ColourJitter(Augmentation):
    """Brightness, contrast and saturation, in this order, as torchvision's `adjust_*` do it."""

    keys = ("colour_jitter",)
    columns = (("brightness", "f4", 1.0), ("contrast", "f4", 1.0), ("saturation", "f4", 1.0))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        for (name, *_), strength in zip(self.columns, data.colour_jitter, strict=True):
            rows[name] = 1 + strength * (2 * random(name, 1)[:, 0] - 1)

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        names = [name for name, *_ in self.columns]
        factors = on_device(images.device, *(rows[name][:, None] for name in names))
        for name, factor, change in zip(
            names, factors, (brightness, contrast, colour), strict=True
        ):
            if (rows[name] != 1).any():
                images = change(images, factor[..., None, None])
        return images


AUGMENTATIONS: tuple[Augmentation, ...] = (
    RandomCrop(),
    RandomResizedCrop(),
    Flips(),
    ColourJitter(),
    RandAugment(),
    GaussianBlur(),
    Affine(),
    RandomErasing(),
    Mixing(),
)
ON_IMAGES = tuple(a for a in AUGMENTATIONS if type(a).apply is not Augmentation.apply)
