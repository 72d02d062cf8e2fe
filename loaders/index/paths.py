"""Paths of image files, and the check that a file is still the one that was indexed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.errors import UserError, shown
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
        name = os.fsdecode(bytes(self.names[number]))
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
            raise UserError(
                f"{shown(repr(name))} leads out of {self.folder}; write the index again"
            )
        return self.folder + name


def paths_of(files: Sequence[str], root: str) -> Paths:
    """Store these paths of files below `root`, in this order."""
    folder = folder_of(root)
    names = [os.fsencode(os.path.normpath(path).removeprefix(folder)) for path in files]
    return Paths(folder, np.array(names, np.bytes_))


def folder_of(root: str) -> str:
    """Return a folder with the separator at its end; the working directory is empty."""
    return os.path.join(os.path.normpath(root), "").removeprefix("./")


def read_unchanged(
    path: str, header: np.void, start: int = 0, into: np.ndarray | None = None
) -> bytearray:
    """Return the content of a file; with `into`, fill that array with its bytes from `start` on.

    Raises:
        OSError: it cannot be read, or is not the one that was indexed.
    """
    file = os.open(path, os.O_RDONLY)  # a file object would call the system twice as often
    try:
        stat = os.fstat(file)
        check_unchanged(path, header, stat)
        # Unlike bytes, an array can use a bytearray without a copy.
        content = bytearray(stat.st_size if into is None else 0)
        filled = content if into is None else into.data.cast("B")
        if os.preadv(file, [filled], start) < len(filled):
            raise OSError("it is cut short")
        return content
    finally:
        os.close(file)


def check_unchanged(path: str, header: np.void, found: os.stat_result) -> None:
    """Raise BadFileError unless a file, found like this, has the size and the time of change of its
    indexed header (of dtype `HEADER`)."""
    if (header["num_bytes"], header["modified_ns"]) != (found.st_size, found.st_mtime_ns):
        raise BadFileError(f"{path} has changed since it was indexed; start again to reindex it")
