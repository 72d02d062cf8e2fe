"""The index of a data set, from `data.index`, from shards or by its layout."""

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from conf.errors import UserError
from conf.names import file_of, find
from conf.schema import DataConfig
from loaders.index.columns import open_index
from loaders.index.index import Index


def build_index(data: DataConfig) -> tuple[Index, Index]:
    """Build the index of the training and of the validation split, from `data.index` or from the
    files of the data set.

    Raises:
        UserError: the data is missing (the message says how to get it), or has another layout.
    """
    if data.index is not None:
        return open_index(data)
    if hasattr(file_of("loaders.layouts", data.layout, "data.layout"), "build_loaders"):
        raise UserError(f"data.layout={data.layout} is not of images; use a layout of images")
    splits: tuple[Index, Index] = find("loaders.layouts", data.layout, "data.layout")(data)
    return splits


def open_splits(data: DataConfig) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split, from shards if `data.root` holds
    them, as every remote one does; else as `build_index`."""
    if data.index is None and holds_shards(data):
        splits: tuple[Index, Index] = import_shards().open_shards(data)
        return splits
    return build_index(data)


def holds_shards(data: DataConfig) -> bool:
    """Return True if `data.root` holds shards in place of files."""
    return "://" in data.root or os.path.isfile(os.path.join(data.root, "shards.json"))


def import_shards() -> ModuleType:
    """Import `loaders.shards`, which not every project has.

    Raises:
        UserError: it is not there.
    """
    if find_spec("loaders.shards") is None:
        raise UserError(
            "shards and addresses need loaders/shards and loaders/storage, which this project does "
            "not have; add them, or set data.root to a folder of files"
        )
    return import_module("loaders.shards")
