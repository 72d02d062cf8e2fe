"""How the samples of a data set lie on disk: one file per layout, whose function finds them.

A layout takes `cfg.data` and returns the `Index` of the training and of the validation split.
"""

from collections.abc import Callable

from conf.schema import DataConfig
from loaders.columns import open_index
from loaders.index import Index
from loaders.layouts.class_folders import caltech256, cells, imagefolder
from loaders.layouts.digits import mnist, mnist_mini
from loaders.layouts.masks import masks
from loaders.layouts.pairs import pairs
from loaders.layouts.table import table
from loaders.shard_index import holds_shards, open_shards

LAYOUTS: dict[str, Callable[[DataConfig], tuple[Index, Index]]] = {
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
    """Index of the training and of the validation split: that of shards or of `data.index`, or made anew.

    Raises:
        ValueError: the files do not have that layout.
        FileNotFoundError: the data is not there; the message says how to get it.
    """
    if data.index is not None:
        return open_index(data)
    return open_shards(data) if holds_shards(data.root) else LAYOUTS[data.layout](data)
