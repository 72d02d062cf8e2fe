"""CIFAR-10, in memory: 50,000 training and 10,000 test images of 32x32, 10 classes."""

from pathlib import Path

from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts.mnist import downloaded


def cifar10(data: DataConfig) -> tuple[Index, Index]:
    from torchvision.datasets import CIFAR10

    return downloaded(data, CIFAR10, Path(data.root, CIFAR10.base_folder), CIFAR10.filename)
