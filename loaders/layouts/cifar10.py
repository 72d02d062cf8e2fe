"""CIFAR-10, in memory: 50,000 training and 10,000 test images of 32x32, 10 classes."""

from collections.abc import Collection

from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts.mnist import downloaded


def cifar10(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    from torchvision.datasets import CIFAR10

    return downloaded(data, CIFAR10, "", CIFAR10.filename)
