"""The layouts of data, by name, one file each.

Your own: `scenes.py` in this folder with a function `scenes`, which takes `cfg.data` and the wanted
splits, and returns the `Index` of each by split: of `train`, of `val` and, if it is wanted and
there is one, of `test`. For data without an index, such as streams, a class `Scenes` of loaders,
like `loaders.Loader`, takes its place: `Scenes(cfg, split, device, rank, world_size)`.
"""

import os
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec

from conf.errors import UserError
from conf.names import find
from conf.schema import DataConfig
from loaders.index import SPLITS, Index


def open_index(data: DataConfig, splits: Collection[str] = SPLITS) -> dict[str, Index]:
    """Open the index of each of these splits, by split: of shards, or of files by their layout.

    There are always `train` and `val`; no `test` if its samples validate, or of shards.

    Raises:
        UserError: the data is missing (the message says how to get it), or has another layout.
    """
    if "://" in data.root or os.path.isfile(os.path.join(data.root, "shards.json")):
        if find_spec("loaders.shards") is None:
            raise UserError(
                f"data.root={data.root} needs loaders/shards, which this project does not have; "
                "add it, or set data.root to a folder of files"
            )
        return import_module("loaders.shards").open_shards(data)
    if data.shuffle == "window":
        raise UserError("data.shuffle=window needs data in shards; use data.shuffle=full")
    layout = find("loaders.layouts", data.layout, "data.layout")
    if isinstance(layout, type):
        raise UserError(
            f"data.layout={data.layout} has no index of images, which loaders.check and "
            "loaders.pack read; use a layout of image files"
        )
    indexes = layout(data, splits)
    if data.leave_out is not None and indexes["train"].form == "pixels":
        raise UserError(
            f"data.leave_out={data.leave_out} names files, and data={data.layout} has none; leave "
            "it out"
        )
    return indexes
