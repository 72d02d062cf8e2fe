"""The paths of indexed files, and reading those that have not changed since."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders.epoch import BadFileError


@dataclass(frozen=True, eq=False)
class Paths(Sequence[str]):
    """The paths of N files, in an array that is smaller than N strings and that processes share."""

    folder: str
    """Below which all of them lie, as `folder_of` returns it."""

    names: np.ndarray
    """(N,) bytes: what follows in each path."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        return self.folder + os.fsdecode(bytes(self.names[number]))

    @property
    def length(self) -> int:
        """Bytes of the longest path, or more, with a zero at its end."""
        return len(os.fsencode(self.folder)) + self.names.itemsize + 1

    def as_bytes(self, numbers: np.ndarray, length: int) -> np.ndarray:
        """Return some paths with zeros at their ends, (len(numbers), length) uint8."""
        folder = os.fsencode(self.folder)
        paths = np.zeros((len(numbers), length), np.uint8)
        paths[:, : len(folder)] = np.frombuffer(folder, np.uint8)
        names = self.names[numbers].view(np.uint8).reshape(len(numbers), self.names.itemsize)
        paths[:, len(folder) :][:, : names.shape[1]] = names
        return paths


def paths_of(files: Sequence[str], root: str) -> Paths:
    """Store these paths of files below `root`, in this order."""
    folder = folder_of(root)
    names = [os.fsencode(os.path.normpath(path).removeprefix(folder)) for path in files]
    return Paths(folder, np.array(names, np.bytes_))


def folder_of(root: str) -> str:
    """Return a folder with the separator at its end; the working directory is empty."""
    return os.path.join(os.path.normpath(root), "").removeprefix("./")


def read_unchanged(
    path: str, header: np.void, into: bytearray | memoryview, start: int = 0
) -> None:
    """Fill `into` with the bytes of a file from `start` on.

    Raises:
        OSError: it cannot be read, or is not the one that was indexed.
    """
    file = os.open(path, os.O_RDONLY)  # a file object would call the system twice as often
    try:
        check_unchanged(path, header, os.fstat(file))
        if os.preadv(file, [into], start) < len(into):
            raise OSError("it is cut short")
    finally:
        os.close(file)


def check_unchanged(path: str, header: np.void, found: os.stat_result) -> None:
    """Raise BadFileError unless a file, found like this, has the size and the time of change of its
    indexed header (of dtype `HEADER`)."""
    if (header["num_bytes"], header["modified_ns"]) != (found.st_size, found.st_mtime_ns):
        raise BadFileError(f"{path} has changed since it was indexed; start again to reindex it")
