"""Fashion-MNIST, in memory: 60,000 training and 10,000 test images of 28x28, 10 classes."""

from collections.abc import Collection

from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts.mnist import UNPACKED, downloaded


def fashion(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    from torchvision.datasets import FashionMNIST

    return downloaded(data, FashionMNIST, "FashionMNIST/raw", UNPACKED)
