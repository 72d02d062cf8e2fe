"""Open a data set in shards: tar files, and columns of the index that were written with them.

`data.root`, a folder, web server or bucket, then holds:

    shards.json                    settings, and what each shard holds
    train/000000.tar ..., val/...  the files of the samples, as WebDataset names them
    train/000000/ ..., val/...     the columns of a shard's samples, see `loaders.columns`

The columns of all shards are joined in `data.cache_dir`, where remote shards are copied to when
they are needed.
"""

import hashlib
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.columns import (
    FACTS,
    open_column,
    open_index,
    parse_facts,
    read_facts,
    replaced_folder,
    write_index,
)
from loaders.file_index import listed_files
from loaders.files import Files, Paths, open_files
from loaders.headers import one_process_at_a_time
from loaders.index import Index, new_index
from loaders.layouts import SPLITS, check_settings
from loaders.shards.copies import Copies
from loaders.shards.source import Shards
from loaders.shards.storage import MissingError, Storage

Columns = dict[str, np.ndarray]
"""Arrays with one row a sample, by name."""

DESCRIPTION = "shards.json"
IN_FLIGHT = 32
"""Number of requests at a time."""


def open_shards(data: DataConfig) -> dict[str, Index]:
    """Open the index of the training and of the validation split from the shards below `data.root`.

    Raises:
        UserError: shards are missing, damaged, packed with other settings or by another version, or
            there is no space for their copies.
        StorageError: their storage cannot be used.
    """
    storage, where = Storage(data.root, data.retry_s), f"data.root={data.root}: {DESCRIPTION}"
    pack = f"python -m loaders.pack data={data.layout} data.root=FOLDER format=shards out="
    try:
        text = storage.read(DESCRIPTION)
    except MissingError as error:
        raise UserError(f"{where} is missing; pack the data by {pack}{data.root}") from error
    about = parse_facts(text, where, f"check data.root, or pack by {pack}ANOTHER_PLACE")
    check_settings(about["settings"], data, where, f"pack by {pack}ANOTHER_PLACE")
    description, listed = hashlib.sha256(text).hexdigest()[:16], listed_files(data)
    cache = Path(data.cache_dir, "shards", description).absolute()
    folder = cache / f"index-{zlib.crc32(repr(sorted(listed)).encode()):08x}"
    if not folder.is_dir():
        _check_complete(storage, about, f"{pack}{data.root} shard_mb={about['shard_mb']:g}")
        try:
            with one_process_at_a_time(folder):
                if not folder.is_dir():
                    _join_columns(storage, about, listed, folder)
        except OSError as error:
            raise UserError(
                f"data.cache_dir={data.cache_dir} cannot be written to ({error}); use another one"
            ) from error
    window = data.shuffle_window if data.shuffle == "window" else None
    indexes, sizes = {}, []
    for split in SPLITS:
        source = Shards(folder / split, Copies(storage, split, cache), description, window)
        indexes[split] = open_index(folder / split, source)
        of_split = sorted(about["splits"][split]["num_bytes"])
        # The window before, the current and the next one.
        sizes += of_split if window is None else of_split[-3 * window :]
    if storage.scheme:
        _check_space(sizes, data, cache)
    return indexes


def shard_names(about: dict[str, Any]) -> list[str]:
    """Return the names of all shards."""
    counts = {split: len(about["splits"][split]["num_samples"]) for split in SPLITS}
    return [f"{split}/{number:06d}" for split in SPLITS for number in range(counts[split])]


def missing_shards(storage: Storage, names: list[str]) -> list[str]:
    """Return the names of the shards that are not packed yet."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        is_packed = pool.map(storage.exists, [f"{name}/{FACTS}" for name in names])
        return [name for name, packed in zip(names, is_packed, strict=True) if not packed]


def index_of(columns: Columns, like: Index) -> Index:
    """Return the index of samples with these columns; all else is as in the index `like`."""
    target = like.target
    if target.has_values:
        target = replace(target, values=columns["values"])
    sides = range(len(like.sides))
    paths = tuple(Paths("", columns[f"names-{side}"]) for side in sides)
    files = Files(paths, tuple(columns[f"headers-{side}"] for side in sides))
    return new_index(like.name, columns["sizes"], target, like.inputs, files, notes=like.notes)


def _check_complete(storage: Storage, about: dict[str, Any], pack: str) -> None:
    names = shard_names(about)
    missing = missing_shards(storage, names)
    if missing:
        first, end = names.index(missing[0]), names.index(missing[-1]) + 1
        raise UserError(
            f"data.root={storage.root} lacks {len(missing)} of {counted(len(names), 'shard')}: "
            f"{first_few(missing)}; pack them by {pack} shards={first}:{end}"
        )


def _join_columns(
    storage: Storage, about: dict[str, Any], listed: frozenset[str], folder: Path
) -> None:
    """Write the index of all splits, without the files `listed`."""
    # Lines are places, see `Shards.place`, or paths below the folder that was packed.
    left_out = [os.fsencode(line.rpartition(".tar: ")[2]) for line in sorted(listed)]
    with replaced_folder(folder) as unfinished, TemporaryDirectory(dir=folder.parent) as copies:
        for split in SPLITS:
            shards = [name for name in shard_names(about) if name.startswith(f"{split}/")]
            try:
                index, columns = _joined(storage, shards, about["columns"], Path(copies))
            except UserError as error:
                raise UserError(str(error).replace(f"{copies}/", storage.place_of(""))) from None
            if index.fingerprint != about["splits"][split]["fingerprint"]:
                raise UserError(
                    f"{storage.place_of(split)}: the columns of the shards are not those that "
                    f"{DESCRIPTION} describes; pack the data again into another place"
                )
            if left_out:
                sides = [columns[f"names-{side}"] for side in range(len(index.sides))]
                kept = ~np.any([np.isin(names, left_out) for names in sides], axis=0)
                columns = {name: column[kept] for name, column in columns.items()}
                index = index_of(columns, index)
            spans = columns["spans-0"]
            counts = np.bincount(spans["shard"], minlength=len(shards))
            columns["order"] = np.lexsort((spans["start"], spans["shard"]))
            columns["starts"] = np.concatenate([[0], np.cumsum(counts)])
            write_index(index, unfinished / split, columns)


def _joined(
    storage: Storage, names: list[str], columns: list[str], copies: Path
) -> tuple[Index, Columns]:
    """Return the index and the columns of a split, by way of copies of those of its shards."""

    def read(name: str) -> Columns:
        folder = copies / name
        folder.mkdir(parents=True)
        for file in (FACTS, "distinct_sizes.npy", *(f"{column}.npy" for column in columns)):
            storage.fetch(f"{name}/{file}", folder / Path(file).name)
        read_facts(folder / FACTS, "pack the shard again")
        # In memory: a process can map fewer files than there may be.
        return {column: np.array(open_column(folder / f"{column}.npy")) for column in columns}

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        parts = list(pool.map(read, names))
    order = np.argsort(np.concatenate([part["samples"] for part in parts]))
    joined = {name: np.concatenate([part[name] for part in parts])[order] for name in columns}
    first = open_index(copies / names[0], open_files(copies / names[0], ""))
    return index_of(joined, first), joined


def _check_space(sizes: list[int], data: DataConfig, cache: Path) -> None:
    """Raise UserError if copies of shards of these sizes do not fit on the disk."""
    needed, free = sum(sizes), shutil.disk_usage(cache).free
    for path in cache.glob("*/*.tar"):
        with suppress(FileNotFoundError):  # another process has removed it
            free += path.stat().st_size
    if needed > free:
        raise UserError(
            f"data.cache_dir={data.cache_dir} has {free / 1e9:.3g} GB of free space, but copies of "
            f"{counted(len(sizes), 'shard')} need {needed / 1e9:.3g} GB; use another one, "
            "data.shuffle=window or a smaller data.shuffle_window"
        )
