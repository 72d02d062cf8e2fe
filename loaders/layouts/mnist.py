"""Data sets of torchvision that lie in memory: MNIST here, others under their own names."""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.columns import one_process_at_a_time
from loaders.images import reason_of
from loaders.index import Index
from loaders.pixels import in_memory
from loaders.splits import check_no_split

DATASETS = {
    "mnist": ("MNIST", "MNIST/raw/train-images-idx3-ubyte and its like, unpacked"),
    "fashion": ("FashionMNIST", "FashionMNIST/raw/train-images-idx3-ubyte and its like, unpacked"),
    "cifar10": ("CIFAR10", "cifar-10-python.tar.gz"),
}
"""Layout -> class of torchvision, and where it looks for files below `data.root`."""


def mnist(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each split of the data set that `data.layout` names.

    torchvision downloads it first if it is missing, and checks the hash of each file; a download
    that was stopped goes on with the first file that is not complete.
    """
    import torchvision

    check_no_split(data)
    name, files = DATASETS[data.layout]
    dataset = getattr(torchvision.datasets, name)
    try:
        try:
            both = [dataset(data.root, train=train) for train in (True, False)]
        except RuntimeError:  # files are missing
            with one_process_at_a_time(Path(data.root) / "download"):
                both = [dataset(data.root, train=train, download=True) for train in (True, False)]
    except Exception as error:  # damaged bytes make torchvision raise errors of any type
        raise UserError(
            f"{data.layout} cannot be read or downloaded ({reason_of(error, data.root)}); remove "
            f"what is damaged, bring {data.root}/{files}, or use data=mnist_mini"
        ) from error
    classes = tuple(name.partition(" - ")[0] for name in both[0].classes)  # of `3 - three`
    return {
        split: in_memory(
            f"{data.layout}/{split}", np.asarray(x.data), np.asarray(x.targets), classes
        )
        for split, x in zip(("train", "val"), both, strict=True)
    }
