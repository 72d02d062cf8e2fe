"""All of MNIST, in memory; and how any such data set of torchvision becomes an index."""

from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.images import reason_of
from loaders.index import Index, check_no_split, one_process_at_a_time
from loaders.layouts.mnist_mini import in_memory

UNPACKED = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
    "t10k-labels-idx1-ubyte, unpacked"
)


def mnist(data: DataConfig) -> tuple[Index, Index]:
    """Return the index of the training and of the validation split."""
    from torchvision.datasets import MNIST

    return downloaded(data, MNIST, "MNIST/raw", UNPACKED, tuple("0123456789"))


def downloaded(
    data: DataConfig, dataset: Any, folder: str, files: str, classes: tuple[str, ...] = ()
) -> tuple[Index, Index]:
    """Read a data set of torchvision that lies in memory, and download it first if it is missing.

    torchvision checks the hash of each file; a download that was stopped goes on with the first
    file that is not complete.

    Args:
        data: `data.root` holds the data set.
        dataset: class of torchvision, whose `train=False` is the split for validation.
        folder: where its files lie below `data.root`, for the error.
        files: names of these files, for the error.
        classes: names of the classes; by default, those that torchvision has.

    Raises:
        UserError: the files are damaged, or could not be downloaded.
    """
    check_no_split(data)
    place = str(Path(data.root, folder))
    try:
        try:
            splits = [dataset(data.root, train=train) for train in (True, False)]
        except RuntimeError:  # they are missing
            with one_process_at_a_time(Path(data.root) / "download"):
                dataset(data.root, download=True)
            splits = [dataset(data.root, train=train) for train in (True, False)]
    except Exception as error:  # damaged bytes make torchvision raise errors of any type
        raise UserError(
            f"{data.layout}: {place} cannot be read or downloaded ({reason_of(error, place)}); "
            f"remove what is damaged, put {files} there, or use data=mnist_mini, which needs no "
            "download"
        ) from error
    names = classes or tuple(splits[0].classes)
    train, val = (
        in_memory(f"{data.layout}/{name}", np.asarray(x.data), np.asarray(x.targets), names)
        for name, x in zip(("train", "val"), splits, strict=True)
    )
    return train, val
