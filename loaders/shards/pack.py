"""Write a data set as shards: tar files in WebDataset's format, and columns of their samples.

Files are copied unchanged. The sidecar of a shard is written after its tar file: a command that was
stopped, or that runs on several machines, skips the shards that have one.
"""

import json
import os
import re
import tarfile
import zlib
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.columns import FORMAT, Columns, settings_of
from loaders.index import Index
from loaders.limits import cpus_per_rank, map_in_threads
from loaders.order import random_permutation, stream_key
from loaders.shards.source import DESCRIPTION, SPAN
from loaders.shards.storage import Storage

OF_FILES = ("table", "path_column")
"""Keys of `data` that locate labels, which the columns hold."""

OF_SAMPLES = ("sizes", "values", "names", "headers")
"""Beginnings of the names of columns that a sidecar has of an index."""


def pack_shards(
    data: DataConfig, indexes: dict[str, Index], out: str, shard_mb: str = "128", shards: str = ""
) -> None:
    """Write the indexes of `data` as shards of about `shard_mb` MB into `out`, a folder or an
    address as of `Storage`.

    `shards` chooses some of all shards, those of training first, such as `0:64`; empty: all.
    """
    storage = Storage(out, data.retry_s)
    samples = {
        f"{split}/{number:06d}": part
        for split, index in indexes.items()
        for number, part in enumerate(_divide(split, index, data, shard_mb))
    }
    names = [*samples]
    ends = re.fullmatch(r"(\d*):(\d*)", shards or ":")
    chosen = names[int(ends[1] or 0) : int(ends[2] or len(names))] if ends else []
    if not chosen:
        raise UserError(
            f"shards={shards} is not possible; use a range of 0:{len(names)}, such as shards=0:1"
        )
    settings = {key: value for key, value in settings_of(data).items() if key not in OF_FILES}
    about = {
        "format": FORMAT,
        "settings": settings,
        "shards": {name: len(part) for name, part in samples.items()},
        "splits": {split: index.columns.facts for split, index in indexes.items()},
    }
    text = json.dumps(about, default=list).encode()
    if not storage.exists(DESCRIPTION):
        storage.write(DESCRIPTION, text)
    elif storage.read(DESCRIPTION) != text:
        raise UserError(f"{out} holds shards of other data or settings; choose another out=")
    for line in indexes["train"].notes:
        print(line)

    def write(name: str) -> None:
        split, _, number = name.partition("/")
        with TemporaryDirectory(prefix="shard-") as folder:
            tar, sidecar = Path(folder, "tar"), Path(folder, "npz")
            columns = _write_tar(indexes[split], samples[name], int(number), tar)
            with sidecar.open("wb") as file:
                np.savez(file, **columns)  # type: ignore[arg-type]
            storage.write(f"{name}.tar", tar)
            storage.write(f"{name}.npz", sidecar)

    def unpacked(some: list[str]) -> list[str]:
        have = map_in_threads(storage.exists, [f"{name}.npz" for name in some], "looking at shards")
        return [name for name, is_there in zip(some, have, strict=True) if not is_there]

    map_in_threads(write, unpacked(chosen), "packing", max(4, cpus_per_rank()), size=1)
    missing = unpacked(names)
    found = f"{out} has {len(names) - len(missing)} of {counted(len(names), 'shard')}"
    print(f"{found}; missing: {first_few(missing)}" if missing else found)


def _divide(split: str, index: Index, data: DataConfig, shard_mb: str) -> list[np.ndarray]:
    """Return the samples of each shard. Those of training are shuffled, which mixes the classes in
    a shard; those of validation keep the order of the index."""
    try:
        size = 1e6 * float(shard_mb)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise UserError(f"shard_mb={shard_mb} is not possible; use a number above 0, such as 128")
    if not index.headers:
        raise UserError(
            f"data={data.layout} data.root={data.root} has no image files to pack; set data.root "
            "to a folder of images"
        )
    order = np.arange(len(index))
    if split == "train":
        order = random_permutation(order, len(index), stream_key("shard", data.split_seed))
    contents = np.sum([side["num_bytes"][order] for side in index.headers], axis=0)
    num_bytes = contents + len(index.sides) * tarfile.BLOCKSIZE
    shard_of = (np.cumsum(num_bytes) - num_bytes) // size
    return np.split(order, np.flatnonzero(np.diff(shard_of)) + 1)


def _write_tar(index: Index, samples: np.ndarray, number: int, tar: Path) -> Columns:
    """Write the files of samples to a tar file, and return their columns."""
    columns = Columns(samples=samples)
    for name, column in index.columns.items():
        if name.startswith(OF_SAMPLES):
            columns[name] = column[samples]
    kinds = ("",) if len(index.sides) == 1 else (".input", ".target")
    for side in range(len(kinds)):
        columns[f"spans-{side}"] = np.zeros(len(samples), SPAN)
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as file:
        for row, sample in enumerate(samples.tolist()):
            for side, kind in enumerate(kinds):
                content = index.content(sample, side)
                ending = Path(os.fsdecode(columns[f"names-{side}"][row])).suffix.lower()
                # No times and users: the same samples give the same bytes.
                member = tarfile.TarInfo(f"{sample:09d}{kind}{ending}")
                member.size = len(content)
                start = file.offset + tarfile.BLOCKSIZE
                span = number, start, len(content), zlib.crc32(content)
                columns[f"spans-{side}"][row] = span
                file.addfile(member, BytesIO(content))
    return columns
