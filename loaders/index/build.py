"""The index of a data set, from `data.index`, from shards or by its layout."""

import json
import os
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from conf.credentials import without_credentials
from conf.errors import UserError, counted, first_few, shown
from conf.names import file_of, find
from conf.schema import DataConfig
from loaders.index.columns import open_columns, parse_json, replaced_folder, write_columns
from loaders.index.headers import in_threads
from loaders.index.index import Index

SPLITS = ("train", "val")
SETTINGS = ("layout", "val_fraction", "val_count", "split_seed", "background", "exif")
"""Keys of all `data` that decide which samples there are, besides those that only a layout has."""
FORMAT = 4  # changes when what an index on disk holds does


def open_splits(data: DataConfig) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split; see `open_index`."""
    indexes = open_index(data)
    return indexes["train"], indexes["val"]


def open_index(data: DataConfig, splits: Collection[str] = SPLITS) -> dict[str, Index]:
    """Open the index of each of these splits that there is, by split: that of `data.index`, or of
    the shards that `data.root` holds, as every remote one does, or build that of the files there.

    There is always `train` and, if it is wanted, `val`; no `test` if its samples validate.

    Raises:
        UserError: the data is missing (the message says how to get it), or has another layout.
    """
    if data.index is not None:
        return dict(zip(SPLITS, _open_stored(data), strict=True))
    if holds_shards(data):
        return dict(zip(SPLITS, import_shards().open_shards(data), strict=True))
    if hasattr(file_of("loaders.layouts", data.layout, "data.layout"), "build_loaders"):
        raise UserError(f"data.layout={data.layout} is not of images; use a layout of images")
    indexes: dict[str, Index] = find("loaders.layouts", data.layout, "data.layout")(data, splits)
    return indexes


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
            "shards and addresses need loaders/shards, which this project does not have; add it, "
            "or set data.root to a folder of files"
        )
    return import_module("loaders.shards")


def settings_of(data: DataConfig, *more: str) -> dict[str, Any]:
    """Return the keys of `data` that decide which samples there are and what their targets are, and
    further ones, with their values."""
    if data.fold is not None:  # else left out, as by earlier versions
        more = (*more, "fold", "num_folds")
    of_layout = vars(data).keys() - vars(DataConfig()).keys()
    keys = [key for key in vars(data) if key in of_layout or key in (*SETTINGS, *more)]
    return {key: getattr(data, key) for key in keys}


def read_description(
    content: bytes, version: int, data: DataConfig, where: str, fix: str
) -> dict[str, Any]:
    """Read the description of an index, a pack or shards.

    Args:
        content: content of the JSON file.
        version: required value of "format".
        data: configuration, with which its "settings" must agree.
        where: name of the file in messages.
        fix: advice in messages.

    Raises:
        UserError: it is not such a file, was written by another version, or with other settings.
    """
    facts = parse_json(content, where, fix)
    if facts.get("format") != version or "settings" not in facts:
        raise UserError(f"{where} was written by another version; {fix}")
    differing = [
        f"data.{key}={getattr(data, key)} (there: {shown(there)})"
        for key, there in ({"fold": None} | facts["settings"]).items()
        if key in vars(data) and getattr(data, key) != there  # others are of other layouts
    ]
    if differing:
        raise UserError(
            f"{where} was written with other settings: {', '.join(differing)}; use those, or {fix}"
        )
    return facts


def write_index(indexes: dict[str, Index], data: DataConfig, out: Path) -> None:
    """Write the index of each split into the folder `out`, in place of an older one.

    Raises:
        UserError: `out` holds something else, or the data set is not made of image files.
    """
    is_empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_empty and not (out / "index.json").exists():
        raise UserError(f"{out} holds no index; choose another out=DIR")
    if not all(index.files and index.by_path for index in indexes.values()):
        where = f"data={data.layout} data.root={without_credentials(data.root)}"
        raise UserError(f"{where} is not made of image files and needs no index")
    with replaced_folder(out) as folder:
        for split, index in indexes.items():
            write_columns(index, folder / split)
        about = {"format": FORMAT, "settings": settings_of(data)}
        (folder / "index.json").write_text(json.dumps(about, indent=2, default=list) + "\n")


def _open_stored(data: DataConfig) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split in the folder `data.index`.

    Raises:
        UserError: there is no finished index, it was made with other settings, or (unless
            `data.check_files` is off) files have changed since.
    """
    folder = Path(str(data.index))
    again = f"python -m loaders.index data={data.layout} data.root={data.root} out={folder}"
    if not (folder / "index.json").is_file():
        raise UserError(
            f"data.index={folder} is not an index; make one if {data.layout} has image files: "
            f"{again}; else leave it out"
        )
    text = (folder / "index.json").read_bytes()
    read_description(text, FORMAT, data, f"data.index={folder}", f"make it again: {again}")
    train, val = (open_columns(folder / split, data.root) for split in SPLITS)
    for index in (train, val) if data.check_files and data.on_error == "raise" else ():
        parts = np.array_split(np.arange(len(index)), -(-len(index) // 256))
        found = in_threads(index.changed, parts, "looking at files")
        changed = [why for reasons in found for why in reasons.values()]
        if changed:
            raise UserError(
                f"{counted(len(changed), 'sample')} of {index.name} changed since "
                f"data.index={folder} was made: "
                f"{first_few(changed)}; make it again: {again}"
            )
    return train, val
