"""Paths of many files as arrays, which are smaller than so many strings and which processes can share."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Paths(Sequence[str]):
    """The paths of N files; see `paths_of`."""

    folder: str
    """Below which all of them lie, with the separator at its end; empty: the working directory."""

    names: np.ndarray
    """(bytes,) uint8: what follows in each path, one behind another."""

    ends: np.ndarray
    """(N + 1,) int64: where in `names` each one ends, after a 0."""

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        start, end = self.ends[number], self.ends[number + 1]
        return self.folder + os.fsdecode(self.names[start:end].tobytes())


def paths_of(files: Sequence[str]) -> Paths:
    """These paths, in this order."""
    folder = os.path.join(common_folder(files), "") if files else ""
    names = [os.fsencode(path)[len(os.fsencode(folder)) :] for path in files]
    ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
    return Paths(folder, np.frombuffer(b"".join(names), np.uint8), ends)


def common_folder(files: Sequence[str]) -> str:
    """The deepest folder below which all files lie; the first and the last in order tell it."""
    # Not commonpath, which drops "./" and "//", so that the names would be cut at the wrong place.
    return os.path.dirname(os.path.commonprefix([min(files), max(files)]))  # noqa: RUF071
