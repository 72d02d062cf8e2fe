"""Digits in memory: the subset of MNIST in this repository."""

from pathlib import Path

import numpy as np

from conf.schema import DataConfig
from loaders.index import Index, check_no_split
from loaders.targets import Labels

MNIST_MINI = Path(__file__).parents[2] / "data" / "mnist_mini.npz"


def mnist_mini(data: DataConfig) -> tuple[Index, Index]:
    check_no_split(data, "data=mnist_mini")
    with np.load(MNIST_MINI) as arrays:
        return (
            digits("mnist_mini/train", arrays["train_images"], arrays["train_labels"]),
            digits("mnist_mini/val", arrays["val_images"], arrays["val_labels"]),
        )


def digits(name: str, images: np.ndarray, labels: np.ndarray) -> Index:
    """Build the index of (N, 28, 28) images and their (N,) labels."""
    return Index(
        name=name,
        sizes=np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1)),
        channels=1,
        target=Labels(labels.astype(np.int64), tuple("0123456789")),
        pixels=(images.ravel(),),
        offsets=np.arange(len(images)) * (images.size // len(images)),
    )
