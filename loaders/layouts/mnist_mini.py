"""Digits in memory: the subset of MNIST in this repository."""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.schema import DataConfig
from loaders.index import Index
from loaders.pixels import in_memory
from loaders.splits import check_no_split

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
