"""The layouts of data, by name, one file each.

Your own: `scenes.py` in this folder with a function `scenes`, which takes `cfg.data` and the wanted
splits, some of `train`, `val` and `test`, and returns the `Index` of each of them that there is, by
split; those of `train` and `val`, always. For data that stream, a class `Scenes` of loaders, like
`loaders.Loader`, takes its place: `Scenes(cfg, split, device, rank, world_size)`.
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from conf.errors import UserError
from conf.names import find
from conf.schema import DataConfig
from loaders.index import Index

SPLITS = ("train", "val")
SETTINGS = (
    *("layout", "val_fraction", "val_count", "split_seed", "fold", "num_folds"),
    *("background", "exif"),
)
"""Keys of all `data` that decide which samples there are, besides those that only a layout has."""


def index_by_layout(data: DataConfig, splits: Collection[str] = SPLITS) -> dict[str, Index]:
    """Build the index of each of these splits that there is, by split, from the files in
    `data.root`.

    There is always `train` and, if it is wanted, `val`; no `test` if its samples validate.

    Raises:
        UserError: the data is missing (the message says how to get it), or has another layout.
    """
    indexes: dict[str, Index] = find("loaders.layouts", data.layout, "data.layout")(data, splits)
    if data.leave_out is not None and indexes["train"].form == "pixels":
        raise UserError(
            f"data.leave_out={data.leave_out} names files, and data={data.layout} has none; leave "
            "it out"
        )
    return indexes


def settings_of(data: DataConfig, *more: str) -> dict[str, Any]:
    """Return the keys of `data` that decide which samples there are and what their targets are, and
    further ones, with their values."""
    of_layouts = {field.name for field in fields(data) if "data=" in field.metadata.get("of", "")}
    keys = {*SETTINGS, *of_layouts, *more}
    return {key: value for key, value in vars(data).items() if key in keys}


def check_settings(stored: dict[str, Any], data: DataConfig, where: str, fix: str) -> None:
    """Raise UserError if what `settings_of` returned when a file was written differs from `data`;
    settings of other layouts do not count."""
    differing = [
        f"data.{key}={getattr(data, key)} (there: {there})"
        for key, there in stored.items()
        if key in vars(data) and getattr(data, key) != there
    ]
    if differing:
        raise UserError(
            f"{where} was written with other settings: {', '.join(differing)}; use those, or {fix}"
        )
