"""Open a data set: its index, from files or from shards."""

import os

from conf.schema import DataConfig
from loaders.index import Index, build_index


def holds_shards(root: str) -> bool:  # part: shards
    """Return True if a data set is read from shards, as every remote one is."""
    return "://" in root or os.path.isfile(os.path.join(root, "shards.json"))


def open_splits(data: DataConfig) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split.

    Raises:
        UserError: the data is missing, or its files do not have the layout `data.layout`.
    """
    if data.index is None and holds_shards(data.root):  # part: shards
        from loaders.shards import open_shards  # files need none of it

        return open_shards(data)
    return build_index(data)
