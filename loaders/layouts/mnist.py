"""All of MNIST, in memory; and how any such data set of torchvision becomes an index."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.headers import one_process_at_a_time
from loaders.images import reason_of
from loaders.index import Index
from loaders.pixels import in_memory
from loaders.splits import check_no_split

UNPACKED = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
    "t10k-labels-idx1-ubyte, unpacked"
)


def mnist(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    from torchvision.datasets import MNIST

    return downloaded(data, MNIST, "MNIST/raw", UNPACKED, tuple("0123456789"))


def downloaded(
    data: DataConfig, dataset: Any, folder: str, files: str, classes: tuple[str, ...] = ()
) -> dict[str, Index]:
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
            both = [dataset(data.root, train=train) for train in (True, False)]
        except RuntimeError:  # they are missing
            with one_process_at_a_time(Path(data.root) / "download"):
                dataset(data.root, download=True)
            both = [dataset(data.root, train=train) for train in (True, False)]
    except Exception as error:  # damaged bytes make torchvision raise errors of any type
        raise UserError(
            f"{data.layout}: {place} cannot be read or downloaded ({reason_of(error, place)}); "
            f"remove what is damaged, put {files} there, or use data=mnist_mini, which needs no "
            "download"
        ) from error
    names = classes or tuple(both[0].classes)
    return {
        split: in_memory(f"{data.layout}/{split}", np.asarray(x.data), np.asarray(x.targets), names)
        for split, x in zip(("train", "val"), both, strict=True)
    }
