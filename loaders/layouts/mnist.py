"""All of MNIST, in memory; and how any such data set of torchvision becomes an index."""

from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.images import reason_of
from loaders.index import Index, check_no_split, one_process_at_a_time
from loaders.layouts.mnist_mini import in_memory

UNPACKED = ", ".join(
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)


def mnist(data: DataConfig) -> tuple[Index, Index]:
    from torchvision.datasets import MNIST

    folder = Path(data.root, "MNIST", "raw")
    return downloaded(data, MNIST, folder, f"{UNPACKED}, unpacked", tuple("0123456789"))


def downloaded(
    data: DataConfig, dataset: Any, folder: Path, files: str, classes: tuple[str, ...] = ()
) -> tuple[Index, Index]:
    """Read a data set of torchvision that lies in memory, and download it first if it is missing.

    torchvision checks the hash of each file; a download that was stopped goes on with the first
    file that is not complete.

    Args:
        data: `data.root` holds the data set.
        dataset: class of torchvision, whose `train=False` is the split for validation.
        folder: where its files lie.
        files: names of these files, for the error.
        classes: names of the classes; by default, those that torchvision has.

    Raises:
        UserError: the files are damaged, or could not be downloaded.
    """
    check_no_split(data, f"data={data.layout}")
    try:
        try:
            splits = [dataset(data.root, train=train) for train in (True, False)]
        except RuntimeError:  # they are missing
            with one_process_at_a_time(Path(data.root) / "download"):
                dataset(data.root, download=True)
            splits = [dataset(data.root, train=train) for train in (True, False)]
    except Exception as error:  # damaged bytes make torchvision raise errors of any type
        raise UserError(
            f"{data.layout}: {folder} cannot be read or downloaded "
            f"({reason_of(error, str(folder))}); remove what is damaged, put {files} there, or use "
            "data=mnist_mini, which needs no download"
        ) from error
    train, val = (
        in_memory(
            f"{data.layout}/{name}",
            np.asarray(split.data),
            np.asarray(split.targets),
            classes or tuple(split.classes),
        )
        for name, split in zip(("train", "val"), splits, strict=True)
    )
    return train, val
