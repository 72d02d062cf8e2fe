"""Shards: the bytes of tar files that belong to a sample, and reading them."""

import os
import zlib
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

import numpy as np

from conf.credentials import without_credentials
from loaders.index import open_column
from loaders.shards.storage import Storage

SPAN = np.dtype([("shard", "i4"), ("start", "i8"), ("length", "u4"), ("crc32", "u4")])
"""Place of a file's content: number of the shard, first byte, number of bytes, their checksum."""


class Shards:
    """The N samples of a split in S shards, tar files in a folder of this machine.

    Args:
        storage: storage of the shards.
        fingerprint: hash of their description, which holds the checksums of their columns.
        columns: folder of the split's index, of the split's name.

    Attributes:
        spans: (N,) of dtype `SPAN` for each side.
        order: (N,) int64: the samples in the order of the shards and of the places in them.
        starts: (S + 1,) int64: positions in `order` where each shard begins, and the end.
        sizes: number of bytes of each shard up to the end of its last image.

    Raises:
        UserError: a column is missing or damaged.
    """

    def __init__(self, storage: Storage, fingerprint: str, columns: Path) -> None:
        self.storage, self.fingerprint, self.columns = storage, fingerprint, columns
        sides = range(1 + (columns / "headers-1.npy").exists())
        self.spans = [open_column(columns / f"spans-{side}.npy") for side in sides]
        self.order = open_column(columns / "order.npy")
        self.starts = open_column(columns / "starts.npy")
        last = self.order[self.starts[1:] - 1]
        self.sizes: list[int] = np.max(
            [side["start"][last] + side["length"][last] for side in self.spans], axis=0
        ).tolist()

    def path(self, number: int) -> Path:
        """Return the path of a shard."""
        return Path(self.storage.root, shard_name(self.columns.name, number))

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to fetch shards, the first one first. Files of this machine need no fetching."""

    def fetch(self, numbers: Iterable[int]) -> None:
        """Wait until shards can be read. Files of this machine need no waiting."""

    def open(self, number: int) -> FileIO:
        """Open a shard."""
        return FileIO(self.path(number))

    def drop(self, number: int) -> None:
        """Have a shard fetched again in which damaged bytes were found, if it is a copy."""

    def read(self, sample: int, side: int) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: there is no such shard, or its bytes are not those that were packed.
        """
        shard, start, length, crc32 = self.spans[side][sample].item()
        for _ in range(2):
            with self.open(shard) as file:
                content = os.pread(file.fileno(), length, start)
            if zlib.crc32(content) == crc32:
                return content
            self.drop(shard)
        raise OSError(f"in {self.path(shard)}, its bytes are not those packed")

    def place(self, sample: int, side: int) -> str:
        """Return the place of a file, for messages."""
        root = without_credentials(self.storage.root).rstrip("/")
        name = shard_name(self.columns.name, self.spans[side]["shard"][sample])
        return f"{root}/{name}: {key_in_shard(sample)}"


def shard_name(split: str, number: int) -> str:
    """Return the path of a shard below the root."""
    return f"{split}/{number:06d}.tar"


def key_in_shard(sample: int) -> str:
    """Return the beginning of the names of a sample's files in a shard."""
    return f"{sample:09d}"
