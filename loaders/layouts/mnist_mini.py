"""Digits in memory: the subset of MNIST in this repository."""

import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.schema import DataConfig
from loaders.index import Index, MemoryIndex, check_no_split
from loaders.targets import Labels

MNIST_MINI = Path(__file__).parents[2] / "data" / "mnist_mini.npz"


def mnist_mini(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    check_no_split(data)
    with np.load(MNIST_MINI) as arrays:
        return {
            split: in_memory(
                f"mnist_mini/{split}",
                arrays[f"{split}_images"],
                arrays[f"{split}_labels"],
                tuple("0123456789"),
            )
            for split in ("train", "val")
        }


def in_memory(name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> Index:
    """Build the index of uint8 images, (N, H, W) or (N, H, W, channels), and their (N,) labels."""
    return MemoryIndex(
        name=name,
        sizes=np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1)),
        channels=math.prod(images.shape[3:]),
        target=Labels(labels.astype(np.int64), classes),
        pixels=(images.ravel(),),
        offsets=np.arange(len(images)) * math.prod(images.shape[1:3]),
    )
