"""The shards of a split: which bytes of which tar file are a sample's, and how these are read."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from loaders.storage import Storage, is_remote, without_credentials

SPAN = np.dtype([("shard", "i4"), ("start", "i8"), ("length", "u4"), ("crc32", "u4")])
"""Where a file's content lies: number of the shard, first byte, number of bytes, and their checksum."""


def shard_name(split: str, number: int) -> str:
    """Below the root."""
    return f"{split}/{number:06d}.tar"


def key_in_shard(sample: int) -> str:
    """What the names of a sample's files in a shard begin with."""
    return f"{sample:09d}"


@dataclass(frozen=True, eq=False)
class Shards:
    """The N samples of a split in S shards."""

    storage: Storage
    split: str
    """`train` or `val`."""

    spans: tuple[np.ndarray, ...]
    """For each side (N,) of dtype `SPAN`."""

    order: np.ndarray
    """(N,) int64: the samples, one shard behind another, as they lie there."""

    starts: np.ndarray
    """(S + 1,) int64: where in `order` each shard begins, and its end."""

    fingerprint: str = ""
    """Of the description of all shards, which holds the checksums of what is known of them."""

    @property
    def is_remote(self) -> bool:
        """Whether reading takes so long that it has to begin well ahead."""
        return bool(is_remote(self.storage.root))

    @property
    def is_cached(self) -> bool:
        """Whether whole shards are fetched when something of them is read."""
        return self.storage.origin is not self.storage

    def fetch(self, number: int) -> None:
        """Let the cache begin to fetch a shard."""
        self.storage.begin(shard_name(self.split, number), 0, 1)

    def begin(self, sample: int, side: int) -> Callable[[], bytes]:
        """Begin to read the content of a file; the answer waits for it.

        The answer raises StorageError where the shard cannot be read, OSError if the bytes are not those that
        were packed.
        """
        shard, start, length, crc32 = self.spans[side][sample].item()
        where = shard_name(self.split, shard), start, start + length
        if self.is_remote:
            begun: Callable[[], bytes] = self.storage.begin(*where).result
        else:
            begun = partial(self.storage.read, *where)
        again = partial(self.storage.origin.read, *where)

        def content() -> bytes:
            for answer in (begun, again):  # they may have been damaged on their way
                if zlib.crc32(found := answer()) == crc32:
                    return found
            raise OSError("its bytes are not those that were packed")

        return content

    def place(self, sample: int, side: int) -> str:
        """Where a file lies, for messages."""
        shard = shard_name(self.split, self.spans[side]["shard"][sample])
        return (
            f"{without_credentials(self.storage.root).rstrip('/')}/{shard}: {key_in_shard(sample)}"
        )
