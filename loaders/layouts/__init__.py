"""The layouts of data, by name, one file each.

Your own: `scenes.py` in this folder with a function `scenes`, which takes `cfg.data` and the wanted
splits, some of `train`, `val` and `test`, and returns the `Index` of each of them that there is, by
split; those of `train` and `val`, always. For data that stream, a class `Scenes` of loaders, like
`loaders.Loader`, takes its place: `Scenes(cfg, split, device, rank, world_size)`.
"""

import os
from collections.abc import Collection
from importlib import import_module

from conf.errors import UserError
from conf.names import find
from conf.schema import DataConfig
from loaders.index import SPLITS, Index


def holds_shards(data: DataConfig) -> bool:
    """Return True if `data.root` holds shards in place of files."""
    return "://" in data.root or os.path.isfile(os.path.join(data.root, "shards.json"))


def open_index(data: DataConfig, splits: Collection[str] = SPLITS) -> dict[str, Index]:
    """Open the index of each of these splits that there is, by split: that of shards, or of files
    by their layout.

    There is always `train` and, if it is wanted, `val`; no `test` if its samples validate.

    Raises:
        UserError: the data is missing (the message says how to get it), or has another layout.
    """
    indexes: dict[str, Index]
    if holds_shards(data):
        try:
            indexes = import_module("loaders.shards").open_shards(data)
        except ModuleNotFoundError as error:
            if error.name != "loaders.shards":
                raise
            raise UserError(
                f"data.root={data.root} needs loaders/shards, which this project does not have; "
                "add it, or set data.root to a folder of files"
            ) from error
        return indexes
    if data.shuffle == "window":
        raise UserError("data.shuffle=window needs data in shards; use data.shuffle=full")
    layout = find("loaders.layouts", data.layout, "data.layout")
    if isinstance(layout, type):
        raise UserError(
            f"data.layout={data.layout} has no index, as its data stream: loaders.check, "
            "loaders.pack and split=test do not read it"
        )
    indexes = layout(data, splits)
    if data.leave_out is not None and indexes["train"].form == "pixels":
        raise UserError(
            f"data.leave_out={data.leave_out} names files, and data={data.layout} has none; leave "
            "it out"
        )
    return indexes
