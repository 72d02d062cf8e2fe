"""Paths of image files, and the check that a file is still the one that was indexed."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from conf.errors import UserError, shown
from loaders.epoch import BadFileError


@dataclass(frozen=True, eq=False)
class Paths(Sequence[str]):
    """The paths of N files, in an array that is smaller than N strings and that processes share."""

    folder: str
    """Below which all of them lie, with the separator at its end; empty: the working directory."""

    names: np.ndarray
    """(N,) bytes: what follows in each path."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        name = os.fsdecode(bytes(self.names[number]))
        if not is_below(name):
            raise UserError(
                f"{shown(repr(name))} leads out of {self.folder}; write the index again"
            )
        return self.folder + name


def paths_of(files: Sequence[str]) -> Paths:
    """Store these paths, in this order."""
    if not files:
        return Paths("", np.array([], np.bytes_))
    # Not commonpath, which drops "./" and "//": the names would be cut at the wrong place.
    folder = os.path.dirname(os.path.commonprefix([min(files), max(files)]))  # noqa: RUF071
    folder = os.path.join(folder, "")
    start = len(os.fsencode(folder))
    return Paths(folder, np.array([os.fsencode(path)[start:] for path in files], np.bytes_))


def is_below(path: str) -> bool:
    """Return True if a path is relative and does not leave the folder that it starts at."""
    return not os.path.isabs(path) and ".." not in path.split("/") and "\0" not in path


def check_unchanged(path: str, header: np.void, found: os.stat_result) -> None:
    """Compare size and time of change of a file with those that it had when it was indexed.

    Args:
        path: path of the file.
        header: indexed header, of dtype `loaders.images.HEADER`.
        found: current status of the file.

    Raises:
        BadFileError: they differ.
    """
    then = int(header["num_bytes"]), int(header["modified_ns"])
    now = found.st_size, found.st_mtime_ns
    if then != now:
        old, new = (
            f"{size:,} bytes of {datetime.fromtimestamp(time / 1e9).isoformat(' ', 'microseconds')}"
            for size, time in (then, now)
        )
        raise BadFileError(
            f"{path} has changed ({old} when it was indexed, {new} now); start again to reindex it"
        )
