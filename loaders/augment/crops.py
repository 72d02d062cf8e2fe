"""Random crops, which every backend cuts out itself, and flips."""

from collections.abc import Sequence

import numpy as np

from conf.schema import DataConfig
from loaders.augment.base import Augmentation, Random


class RandomCrop(Augmentation):
    """A rectangle anywhere in the image, all places equally likely.

    It has the crop's size or, with `data.random_resized_crop`, a random area and aspect ratio
    (Szegedy et al. 2015, "Going deeper with convolutions", section 6): the first of ten tries that
    fits, else the largest square.
    """

    keys = ("random_crop", "random_resized_crop")

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        if data.random_resized_crop is not None:
            shapes = random_shapes(sizes, data.random_resized_crop, random("height, width", 20))
            rows["height"], rows["width"] = shapes.T
        for start, length, whole in [("y", "height", sizes[:, 0]), ("x", "width", sizes[:, 1])]:
            rows[start] = random(start, 1)[:, 0] * (whole - rows[length] + 1)


def random_shapes(sizes: np.ndarray, share: Sequence[float], numbers: np.ndarray) -> np.ndarray:
    """Return (N, 2) heights and widths of shares of images of these sizes, by uniform (N, 20)."""
    low, high = share
    shares, ratios = np.split(numbers, 2, axis=1)
    area = sizes.prod(axis=1)[:, None] * (low + (high - low) * shares)
    ratio = np.exp(np.log(4 / 3) * (2 * ratios - 1))
    shapes = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(int)
    fits = ((shapes > 0) & (shapes <= sizes[:, None])).all(axis=2)
    first = shapes[np.arange(len(sizes)), fits.argmax(axis=1)]
    return np.where(fits.any(axis=1)[:, None], first, sizes.min(axis=1)[:, None])


class Flips(Augmentation):
    """Left-right and upside-down flips."""

    keys = ("hflip", "vflip")  # columns of every row

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        rows["hflip"] = random("hflip", 1)[:, 0] < data.hflip
        rows["vflip"] = random("vflip", 1)[:, 0] < data.vflip
