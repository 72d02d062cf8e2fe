"""Write a data set as shards: tar files in WebDataset's format, and columns of their samples.

Files are copied unchanged. The columns of a shard are written after its tar file: a command that
was stopped, or that runs on several machines, skips the shards that have some.
"""

import json
import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.columns import FACTS, FORMAT, write_index
from loaders.index import Index
from loaders.layouts import index_by_layout, settings_of
from loaders.limits import cpus_per_rank
from loaders.order import random_permutation, stream_key
from loaders.shards.open import DESCRIPTION, Columns, index_of, missing_shards, shard_names
from loaders.shards.source import SPAN
from loaders.shards.storage import Storage

OF_FILES = ("table", "path_column")
"""Keys of `data` that locate labels, which the columns hold."""


def pack_shards(data: DataConfig, out: str, shard_mb: str = "128", shards: str = "") -> None:
    """Write shards into `out`, a folder or an address as of `Storage`.

    Args:
        data: the configuration.
        out: see above.
        shard_mb: approximate size of a shard in MB.
        shards: which of all shards, those of training first, such as `0:64`; empty: all.

    Raises:
        UserError: an option is not possible, `out` holds shards of other data, or the data has no
            files.
        StorageError: `out` cannot be read or written.
        ReadError: a file cannot be read.
    """
    storage, size = Storage(out, data.retry_s), _size_of(shard_mb)
    indexes = index_by_layout(data)
    for line in indexes["train"].notes:
        print(line)
    splits = {name: Split(name, index, data, size) for name, index in indexes.items()}
    settings = settings_of(data)
    about: dict[str, Any] = {
        "format": FORMAT,
        "settings": {key: settings[key] for key in settings if key not in OF_FILES},
        "shard_mb": size,
        "columns": ["samples", *splits["train"].columns],
        "splits": {name: split.facts for name, split in splits.items()},
    }
    names = shard_names(about)
    chosen = _chosen(names, shards)
    text = json.dumps(about, default=list).encode()
    if not storage.exists(DESCRIPTION):
        storage.write(DESCRIPTION, text)
    elif storage.read(DESCRIPTION) != text:
        raise UserError(f"{out} holds shards of other data or settings; choose another out=")

    def write(name: str) -> None:
        split, _, number = name.partition("/")
        with TemporaryDirectory(prefix="shard-") as temporary:
            tar, columns = Path(temporary, "tar"), Path(temporary, "columns")
            splits[split].write(int(number), tar, columns)
            storage.write(f"{name}.tar", tar)
            # The facts come last: where they are, the shard is whole.
            for path in (*sorted(columns.glob("*.npy")), columns / FACTS):
                storage.write(f"{name}/{path.name}", path)

    left = missing_shards(storage, chosen)
    with ThreadPoolExecutor(max(4, cpus_per_rank())) as pool:
        list(tqdm(pool.map(write, left), "packing", len(left), unit="shard"))
    missing = missing_shards(storage, names)
    print(
        f"{out} has {len(names) - len(missing)} of {counted(len(names), 'shard')}"
        + (f"; missing: {first_few(missing)}" if missing else "")
    )


def _size_of(shard_mb: str) -> float:
    try:
        size = float(shard_mb)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise UserError(f"shard_mb={shard_mb} is not possible; use a number above 0, such as 128")
    return size


def _chosen(names: list[str], shards: str) -> list[str]:
    """Return the names that a range such as `0:64` or `64:` chooses."""
    begin, colon, end = (shards or ":").partition(":")
    try:
        chosen = names[int(begin or 0) : int(end or len(names))]
    except ValueError:
        chosen = []
    if not (colon and chosen):
        raise UserError(
            f"shards={shards} is not possible; use a range of 0:{len(names)}, such as shards=0:1"
        )
    return chosen


class Split:
    """A split, divided into shards.

    Args:
        name: `train` or `val`.
        index: index of its samples.
        data: the configuration.
        shard_mb: approximate size of a shard in MB.

    Attributes:
        columns: columns of all samples; `write` fills in their spans.
        order, starts: see `Shards`. Training samples are shuffled, which mixes the classes in a
            shard; validation samples keep the order of the index.
        facts: what the content of the shards depends on.
    """

    def __init__(self, name: str, index: Index, data: DataConfig, shard_mb: float) -> None:
        self.index, self.headers = index, index.source.headers
        if not self.headers:
            raise UserError(
                f"data={data.layout} data.root={data.root} has no image files to pack; set "
                "data.root to a folder of images"
            )
        self.columns: Columns = {"sizes": index.sizes} | index.source.columns()
        if index.target.has_values:
            self.columns["values"] = index.target.values
        for side in range(len(self.headers)):
            self.columns[f"spans-{side}"] = np.zeros(len(index), SPAN)
        self.order = np.arange(len(index))
        if name == "train":
            key = stream_key("shard", data.split_seed)
            self.order = random_permutation(self.order, len(index), key)
        blocks = [np.ceil(side["num_bytes"] / tarfile.BLOCKSIZE) + 1 for side in self.headers]
        num_bytes = tarfile.BLOCKSIZE * np.sum(blocks, axis=0)[self.order]
        shard_of = (np.cumsum(num_bytes) - num_bytes) // (shard_mb * 1e6)
        changes = np.flatnonzero(np.diff(shard_of)) + 1
        self.starts = np.concatenate([[0], changes, [len(index)]]).astype(np.int64)
        self.facts = {
            "fingerprint": index.fingerprint,
            "num_samples": np.diff(self.starts).tolist(),
            "num_bytes": np.add.reduceat(num_bytes, self.starts[:-1]).astype(int).tolist(),
        }

    def write(self, number: int, tar: Path, folder: Path) -> None:
        """Write a shard to a file, and the columns of its samples to a folder."""
        samples = self.order[self.starts[number] : self.starts[number + 1]]
        columns = {name: column[samples] for name, column in self.columns.items()}
        with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as file:
            for row, sample in enumerate(samples.tolist()):
                for side in range(len(self.headers)):
                    content = self.index.source.content(sample, side)
                    name = os.fsdecode(bytes(columns[f"names-{side}"][row]))
                    kind = (".input", ".target")[side] if len(self.headers) > 1 else ""
                    # No times and users: the same samples give the same bytes.
                    member = tarfile.TarInfo(f"{sample:09d}{kind}{Path(name).suffix.lower()}")
                    member.size = len(content)
                    start = file.offset + tarfile.BLOCKSIZE
                    span = number, start, len(content), zlib.crc32(content)
                    columns[f"spans-{side}"][row] = span
                    file.addfile(member, BytesIO(content))
        for side in range(len(self.headers)):
            columns[f"headers-{side}"]["modified_ns"] = 0
        write_index(index_of(columns, self.index), folder, columns | {"samples": samples})
