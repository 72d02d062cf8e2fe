"""CIFAR-10, in memory: 50,000 training and 10,000 test images of 32x32, 10 classes."""

from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts.mnist import downloaded


def cifar10(data: DataConfig) -> tuple[Index, Index]:
    """Return the index of the training and of the validation split."""
    from torchvision.datasets import CIFAR10

    return downloaded(data, CIFAR10, "", CIFAR10.filename)
