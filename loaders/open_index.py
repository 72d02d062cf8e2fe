"""The index of a data set: that of its shards, or of its files by their layout."""

import os
from collections.abc import Collection
from importlib import import_module

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.index import Index
from loaders.layouts import SPLITS, index_by_layout


def holds_shards(data: DataConfig) -> bool:
    """Return True if `data.root` holds shards in place of files."""
    return "://" in data.root or os.path.isfile(os.path.join(data.root, "shards.json"))


def open_index(data: DataConfig, splits: Collection[str] = SPLITS) -> dict[str, Index]:
    """Open the index of each of these splits that there is, by split; see `index_by_layout`."""
    if not holds_shards(data):
        if data.shuffle == "window":
            raise UserError("data.shuffle=window needs data in shards; use data.shuffle=full")
        return index_by_layout(data, splits)
    try:
        indexes: dict[str, Index] = import_module("loaders.shards").open_shards(data)
    except ModuleNotFoundError as error:
        if error.name != "loaders.shards":
            raise
        raise UserError(
            f"data.root={data.root} needs loaders/shards, which this project does not have; add "
            "it, or set data.root to a folder of files"
        ) from error
    return indexes
