"""Image files as the source of a split."""

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from loaders.columns import Columns
from loaders.images import decode_resized, reason_of
from loaders.index import BadFileError, ReadError, Source
from loaders.targets import ImageSpec


def folder_of(root: str) -> str:
    """Return a folder with the separator at its end; the working directory is empty."""
    return os.path.join(os.path.normpath(root), "").removeprefix("./")


def names_below(root: str, paths: Iterable[str]) -> np.ndarray:
    """Return what follows `root` in these paths, (N,) bytes: an array is smaller than N strings,
    and processes share it."""
    folder = folder_of(root)
    names = [os.fsencode(os.path.normpath(path).removeprefix(folder)) for path in paths]
    return np.array(names, np.bytes_)


class Files(Source):
    """Image files below `root`.

    For each side, the columns have `names`, see `names_below`, and `headers`, (N,) of dtype
    `loaders.images.HEADER`.
    """

    form = "paths"

    fix = "repair or remove it"
    """What to do about a file that cannot be decoded."""

    def __init__(self, columns: Columns, root: str) -> None:
        super().__init__(columns)
        self.folder = folder_of(root)

    def path(self, sample: int, side: int) -> str:
        return self.folder + os.fsdecode(bytes(self.columns[f"names-{side}"][sample]))

    def read_part(
        self,
        sample: int,
        side: int,
        spec: ImageSpec,
        rectangle: Sequence[int],
        size: tuple[int, int],
        reduces: bool,
    ) -> np.ndarray:
        content, header = self.content(sample, side), self.columns[f"headers-{side}"][sample]
        y, x, height, width = (spec.size_factor * length for length in rectangle)
        part = y, x, height, width
        try:
            return decode_resized(
                content, header, spec.content, part, size, spec.interpolation, reduces
            )
        except MemoryError:
            raise
        except Exception as error:  # damaged bytes make decoders raise errors of any type
            raise self.bad_file(sample, side, error) from error

    def bad_file(self, sample: int, side: int, error: Exception) -> BadFileError:
        """Return the error of a file that cannot be decoded."""
        reason = reason_of(error, self.path(sample, side))
        return BadFileError(
            f"{self.place(sample, side)} cannot be decoded ({reason}); {self.fix}, or leave it out "
            "with data.on_error=skip or data.leave_out=FILE"
        )

    @cached_property
    def raw_shape(self) -> tuple[int, int, int, int] | None:
        """Height, width, channels and bits of all images, if they are uncompressed inputs of one
        size."""
        headers = self.headers
        shapes = headers[0][["height", "width", "channels", "bits"]]
        is_raw = (shapes == shapes[:1]).all() and (headers[0]["raw_offset"] >= 0).all()
        return shapes[0].item() if is_raw and len(headers) == 1 else None

    def read_batch(self, samples: np.ndarray) -> np.ndarray | None:
        """Read pixels alone into one array: twice as fast as whole files, one by one (5 channels of
        50x50 pixels)."""
        if self.raw_shape is None:
            return None
        *shape, bits = self.raw_shape
        images = np.empty((len(samples), *shape), f"uint{bits}")
        starts = self.headers[0]["raw_offset"][samples].tolist()
        for sample, start, image in zip(samples.tolist(), starts, images, strict=True):
            path = self.path(sample, 0)
            try:
                file = os.open(path, os.O_RDONLY)  # a file object would call the system more often
                num_bytes = os.preadv(file, [image.data.cast("B")], start)
                os.close(file)
            except OSError as error:
                raise self.unread(path, error) from error
            if num_bytes < image.nbytes:
                raise self.bad_file(sample, 0, EOFError("it is cut short"))
        return images

    def read_form(self, samples: np.ndarray, side: int, spec: ImageSpec) -> Any:
        # One array is fed in a fifth of the time that a list of paths takes; the system takes a
        # path to end at its first zero.
        folder = os.fsencode(self.folder)
        length = len(folder) + 1 + max(names.itemsize for names in self.columns.of_sides("names"))
        paths = np.char.add(folder, self.columns[f"names-{side}"][samples])
        return paths.astype(f"S{length}").view(np.uint8).reshape(len(samples), length)

    def content(self, sample: int, side: int) -> bytes | bytearray:
        """Read the bytes of a file.

        Raises:
            ReadError: it cannot be read.
        """
        path = self.path(sample, side)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        except OSError as error:
            raise self.unread(path, error) from error

    def unread(self, path: str, error: OSError) -> ReadError:
        """Return the error of a file that cannot be read, unless the machine is to blame."""
        return ReadError(f"{path} cannot be read ({reason_of(error, path)}); see to it, and resume")

    def name(self, sample: int) -> str:
        return self.path(sample, 0)

    def place(self, sample: int, side: int) -> str:
        return self.path(sample, side)
