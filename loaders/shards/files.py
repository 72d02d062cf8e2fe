"""Shards: the bytes of tar files that belong to a sample, and reading them."""

import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from conf.errors import UserError

SPAN = np.dtype([("shard", "i4"), ("start", "i8"), ("length", "u4"), ("crc32", "u4")])
"""Place of a file's content: number of the shard, first byte, number of bytes, their checksum."""

MAX_OPEN = 64
"""Shards of a split that a process keeps open."""


class ShardFiles:
    """The S tar files of a split, in a folder of this machine.

    Args:
        folder: folder of the tar files.
        names: names of the tar files.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names
        self._open: dict[int, FileIO] = {}

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_open": {}}

    def path(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.folder / self.names[number]

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Begin to fetch shards, the first one first. Nothing to do for files of this machine."""

    def fetch(self, numbers: Iterable[int]) -> None:
        """Wait until shards can be read.

        Raises:
            UserError: there is no such shard.
        """
        for number in numbers:
            if not self.path(number).is_file():
                raise UserError(
                    f"{self.path(number)} does not exist; set data.root to the folder that holds it"
                )

    def open(self, number: int) -> FileIO:
        """Open a shard; it stays open and can be read even if it is removed meanwhile.

        It is closed when no thread uses it any more.
        """
        file = self._open.get(number)
        if file is None:
            try:
                file = FileIO(self.path(number))
            except FileNotFoundError:
                self.fetch([number])
                file = FileIO(self.path(number))
            # Removed files that are open still take up room on the disk.
            opened = list(self._open.items())
            there = [(n, other) for n, other in opened if os.fstat(other.fileno()).st_nlink]
            self._open = dict([*there, (number, file)][-MAX_OPEN:])
        return file

    def reopen(self, number: int, damaged: FileIO) -> FileIO:
        """Open a shard again in which damaged bytes were found; a copy may be replaced before."""
        return damaged


@dataclass(frozen=True, eq=False)
class Shards:
    """The N samples of a split in S shards."""

    files: ShardFiles

    root: str
    """Address of the shards, for messages."""

    spans: tuple[np.ndarray, ...]
    """(N,) of dtype `SPAN` for each side."""

    order: np.ndarray
    """(N,) int64: the samples in the order of the shards and of the places in them."""

    starts: np.ndarray
    """(S + 1,) int64: positions in `order` where each shard begins, and the end."""

    fingerprint: str = ""
    """Hash of the description of all shards, which holds the checksums of their columns."""

    def read(self, sample: int, side: int) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: its bytes are not those that were packed.
            UserError: there is no such shard.
        """
        shard, start, length, crc32 = self.spans[side][sample].item()
        file = self.files.open(self._existing(shard))
        content = _read(file, start, length)
        if zlib.crc32(content) != crc32:
            content = _read(self.files.reopen(shard, file), start, length)
            if zlib.crc32(content) != crc32:
                raise OSError(f"in {self.files.path(shard)}, its bytes are not those packed")
        return content

    def fetch(self, samples: np.ndarray) -> None:
        """Wait until the shards of these samples can be read."""
        numbers = np.unique(self.spans[0]["shard"][samples]).tolist()
        self.files.fetch([self._existing(number) for number in numbers])

    def place(self, sample: int, side: int) -> str:
        """Return the place of a file, for messages."""
        shard = self.files.names[self.spans[side]["shard"][sample]]
        return f"{self.root.rstrip('/')}/{shard}: {key_in_shard(sample)}"

    def _existing(self, number: int) -> int:
        if not 0 <= number < len(self.files.names):
            raise UserError(
                f"{self.root}: the index refers to shard {number}, but lists "
                f"{len(self.files.names)} shards; restore it, or pack again into another folder"
            )
        return number


def _read(file: FileIO, start: int, length: int) -> bytes:
    """Return bytes of a file; none if it is too short, before so much memory is asked for."""
    if not 0 <= start <= os.fstat(file.fileno()).st_size - length:
        return b""
    return os.pread(file.fileno(), length, start)


def key_in_shard(sample: int) -> str:
    """Return the beginning of the names of a sample's files in a shard."""
    return f"{sample:09d}"
