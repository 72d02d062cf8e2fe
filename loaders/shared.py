"""An index that the worker processes map into their memory, instead of one copy for each of them."""

import io
import mmap
import os
import pickle
from multiprocessing import reduction
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from loaders.index import Index

ALIGNMENT = 64  # bytes


def mapped(path: str | Path) -> np.ndarray:
    """The array in a NumPy file, mapped into memory."""
    # Copy-on-write, because torch warns of memory that cannot be written to.
    return np.load(path, mmap_mode="c").view(np.ndarray)


class SharedIndex:
    """Its arrays in an unnamed file, which a process maps when it unpickles this; it gets the index itself.

    Raises:
        OSError: there is no room for temporary files.
    """

    def __init__(self, index: Index) -> None:
        arrays: list[pickle.PickleBuffer] = []
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=5, buffer_callback=arrays.append).dump(index)
        self.pickled = pickled.getvalue()
        self.file = TemporaryFile()  # noqa: SIM115  # open as long as there may be further workers
        self.spans: list[tuple[int, int]] = []
        for array in arrays:
            start = -(-self.file.tell() // ALIGNMENT) * ALIGNMENT
            self.file.seek(start)
            self.file.write(array.raw())
            self.spans.append((start, self.file.tell()))
        self.file.flush()

    def __reduce__(self) -> Any:
        return _unpickled, (reduction.DupFd(self.file.fileno()), self.pickled, self.spans)


def _unpickled(file: Any, pickled: bytes, spans: list[tuple[int, int]]) -> Index:
    file = file.detach()
    memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY) if os.fstat(file).st_size else b""
    os.close(file)
    whole = memoryview(memory)
    return pickle.loads(pickled, buffers=[whole[start:end] for start, end in spans])


class _Pickler(pickle.Pickler):
    """Arrays that are mapped from files of their own are mapped again, not copied."""

    def reducer_override(self, value: Any) -> Any:
        file = getattr(value, "base", None) if isinstance(value, np.ndarray) else None
        if isinstance(file, np.memmap):
            return mapped, (file.filename,)
        return NotImplemented
