"""Random crops and flips, which every backend executes itself."""

import numpy as np

from conf.schema import DataConfig
from loaders.augment.base import Augmentation, Random


class RandomCrop(Augmentation):
    """A rectangle of the crop's size anywhere in the image."""

    keys = ("random_crop",)

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        _place(rows, sizes, random)


class RandomResizedCrop(Augmentation):
    """A rectangle of random position, area and aspect ratio (Szegedy et al. 2015, "Going deeper
    with convolutions", section 6): the first of ten tries that fits, else the largest square."""

    keys = ("random_resized_crop",)

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
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
    """Move the rows' rectangles to random positions, all equally likely."""
    for start, length, whole in [("y", "height", sizes[:, 0]), ("x", "width", sizes[:, 1])]:
        rows[start] = random(start, 1)[:, 0] * (whole - rows[length] + 1)


class Flips(Augmentation):
    """Left-right and upside-down flips."""

    keys = ("hflip", "vflip")
    columns = (("hflip", "?", False), ("vflip", "?", False))

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        rows["hflip"] = random("hflip", 1)[:, 0] < data.hflip
        rows["vflip"] = random("vflip", 1)[:, 0] < data.vflip
