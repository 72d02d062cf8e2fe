"""The layouts of data sets on disk: one file per layout, whose function finds the samples.

The function takes `cfg.data` and returns the `Index` of the training and of the validation split.
"""

from collections.abc import Callable

from conf.errors import unknown_name
from conf.schema import DataConfig
from loaders.index.caltech256 import caltech256
from loaders.index.class_folders import cells, imagefolder
from loaders.index.columns import open_index
from loaders.index.digits import mnist_mini
from loaders.index.index import Index
from loaders.index.masks import masks
from loaders.index.mnist import mnist
from loaders.index.pairs import pairs
from loaders.index.table import table

DATASETS: dict[str, Callable[[DataConfig], tuple[Index, Index]]] = {
    "mnist_mini": mnist_mini,
    "mnist": mnist,
    "caltech256": caltech256,
    "imagefolder": imagefolder,
    "pairs": pairs,
    "cells": cells,
    "table": table,
    "masks": masks,
}


def build_index(data: DataConfig) -> tuple[Index, Index]:
    """Build the index of the training and of the validation split, from `data.index` or from the
    files of the data set.

    Raises:
        UserError: the data is missing (the message says how to get it), or has another layout.
    """
    if data.index is not None:  # part: index
        return open_index(data)
    if data.layout not in DATASETS:
        raise unknown_name("data.layout", data.layout, DATASETS)
    return DATASETS[data.layout](data)
