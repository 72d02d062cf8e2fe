"""Fashion-MNIST, in memory: 60,000 training and 10,000 test images of 28x28, 10 classes."""

from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts.mnist import UNPACKED, downloaded


def fashion(data: DataConfig) -> tuple[Index, Index]:
    """Return the index of the training and of the validation split."""
    from torchvision.datasets import FashionMNIST

    return downloaded(data, FashionMNIST, "FashionMNIST/raw", UNPACKED)
