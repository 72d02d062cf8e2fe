"""Image files as the source of a split."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from loaders.columns import open_column
from loaders.images import decode, decode_resized, reason_of
from loaders.index import BadFileError, ReadError, Source
from loaders.targets import ImageSpec


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


class Files(Source):
    """Image files.

    Args:
        paths: paths of each side.
        headers: (N,) of dtype `loaders.images.HEADER` of each side.
        folder: folder of these columns; None: they are in memory.
    """

    form = "paths"

    fix = "repair or remove it"
    """What to do about a file that cannot be decoded."""

    def __init__(
        self,
        paths: tuple[Paths, ...],
        headers: tuple[np.ndarray, ...],
        folder: Path | None = None,
    ) -> None:
        self.paths, self.headers, self.folder = paths, headers, folder

    def __reduce__(self) -> Any:
        return open_files, (self.folder, self.paths[0].folder)

    def read(self, sample: int, side: int, spec: ImageSpec) -> np.ndarray:
        return self._decoded(sample, side, decode, spec.content)

    def read_part(
        self,
        sample: int,
        side: int,
        spec: ImageSpec,
        rectangle: Sequence[int],
        size: tuple[int, int],
        reduces: bool,
    ) -> np.ndarray:
        part = [spec.size_factor * length for length in rectangle]
        options = spec.content, part, size, spec.interpolation, reduces
        return self._decoded(sample, side, decode_resized, *options)

    def _decoded(
        self, sample: int, side: int, decode: Callable[..., np.ndarray], *options: Any
    ) -> np.ndarray:
        content = self.content(sample, side)
        try:
            return decode(content, self.headers[side][sample], *options)
        except MemoryError:
            raise
        except Exception as error:  # damaged bytes make decoders raise errors of any type
            raise self.bad_file(sample, side, error) from error

    def bad_file(self, sample: int, side: int, error: Exception) -> BadFileError:
        """Return the error to raise where decoding a file failed with `error`."""
        reason = reason_of(error, self.paths[side][sample])
        return BadFileError(
            f"{self.place(sample, side)} cannot be decoded ({reason}); {self.fix}, or leave it out "
            "with data.on_error=skip or data.leave_out=FILE"
        )

    @cached_property
    def is_raw(self) -> bool:
        """True if the inputs are uncompressed and have one size, and there are no targets."""
        headers, shape = self.headers[0], ["height", "width", "channels", "bits"]
        has_one_shape = len(self.headers) == 1 and bool(
            (headers[shape] == headers[shape][:1]).all()
        )
        return has_one_shape and bool((headers["raw_offset"] >= 0).all())

    def read_batch(self, samples: np.ndarray) -> np.ndarray | None:
        """Read pixels alone into one array: twice as fast as whole files, one by one (5 channels of
        50x50 pixels)."""
        if not self.is_raw:
            return None
        first = self.headers[0][0]
        shape = [int(first[name]) for name in ("height", "width", "channels")]
        images = np.empty((len(samples), *shape), f"uint{first['bits']}")
        starts = self.headers[0]["raw_offset"][samples].tolist()
        for sample, start, image in zip(samples.tolist(), starts, images, strict=True):
            path = self.paths[0][sample]
            try:
                file = os.open(path, os.O_RDONLY)  # a file object would call the system more often
                num_bytes = os.preadv(file, [image.data.cast("B")], start)
                os.close(file)
            except OSError as error:
                raise self.unread(path, error) from error
            if num_bytes < image.nbytes:
                raise self.bad_file(sample, 0, EOFError("it is cut short"))
        return images

    def read_form(self, samples: np.ndarray, side: int, spec: ImageSpec) -> np.ndarray:
        # One array is fed in a fifth of the time that a list of paths takes; the system takes a
        # path to end at its first zero.
        length = max(paths.length for paths in self.paths)
        return self.paths[side].as_bytes(samples, length)

    def content(self, sample: int, side: int) -> bytes | bytearray:
        """Read the bytes of a file.

        Raises:
            ReadError: it cannot be read.
            OSError: there are no file handles or no memory left.
        """
        path = self.paths[side][sample]
        try:
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        except OSError as error:
            raise self.unread(path, error) from error

    def unread(self, path: str, error: OSError) -> ReadError:
        """Return the error to raise where a file cannot be read.

        Raises:
            OSError: `error`, if there are no file handles or no memory left.
        """
        return ReadError(f"{path} cannot be read ({reason_of(error, path)}); see to it, and resume")

    def name(self, sample: int) -> str:
        return self.paths[0][sample]

    def place(self, sample: int, side: int) -> str:
        return self.paths[side][sample]

    def identity(self) -> list[np.ndarray]:
        parts = []
        for paths in self.paths:
            ends = np.concatenate([[0], np.cumsum(np.char.str_len(paths.names))])
            # Without the zeros that fill up shorter names.
            parts += [np.frombuffer(paths.names.tobytes().replace(b"\0", b""), np.uint8), ends]
        return parts

    def columns(self) -> dict[str, np.ndarray]:
        columns: dict[str, np.ndarray] = {}
        for side, (paths, headers) in enumerate(zip(self.paths, self.headers, strict=True)):
            columns |= {f"names-{side}": paths.names, f"headers-{side}": headers}
        return columns

    def opened(self, folder: Path) -> "Files":
        return open_files(folder, self.paths[0].folder)


def open_files(folder: Path, root: str) -> Files:
    """Map the columns of image files below `root` into memory.

    Raises:
        UserError: a column is missing or damaged.
    """
    sides = range(len(list(folder.glob("names-*.npy"))))
    names = [open_column(folder / f"names-{side}.npy") for side in sides]
    headers = tuple(open_column(folder / f"headers-{side}.npy") for side in sides)
    return Files(tuple(Paths(folder_of(root), each) for each in names), headers, folder)
