"""Fashion-MNIST, in memory: 60,000 training and 10,000 test images of 28x28, 10 classes."""

from pathlib import Path

from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts.mnist import UNPACKED, downloaded


def fashion(data: DataConfig) -> tuple[Index, Index]:
    from torchvision.datasets import FashionMNIST

    folder = Path(data.root, "FashionMNIST", "raw")
    return downloaded(data, FashionMNIST, folder, f"{UNPACKED}, unpacked")
