"""Images in files, and decoded ones in memory or in files that are mapped into it."""

import math
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from loaders.columns import Columns
from loaders.images import reason_of, resize
from loaders.index import Index, ReadError, complete
from loaders.targets import ImageSpec, Target


def folder_of(root: str) -> str:
    """Return a folder with the separator at its end; the working directory is empty."""
    return os.path.join(os.path.normpath(root), "").removeprefix("./")


def path_below(root: str, name: bytes) -> str:
    """Return the path of a file that is called `name` below `root`."""
    return folder_of(root) + os.fsdecode(bytes(name))


class Files(Index):
    """Image files below `root`."""

    form = "paths"

    def __init__(self, columns: Columns, root: str) -> None:
        super().__init__(columns)
        self.folder = folder_of(root)

    def content(self, sample: int, side: int) -> bytes | bytearray:
        path = self.name_of(sample, side)
        try:
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        except OSError as error:
            raise _unread(path, error) from error

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
            path = self.name_of(sample)
            try:
                file = os.open(path, os.O_RDONLY)  # a file object would call the system more often
                try:
                    num_bytes = os.preadv(file, [image.data.cast("B")], start)
                finally:
                    os.close(file)
            except OSError as error:
                raise _unread(path, error) from error
            if num_bytes < image.nbytes:
                raise self.bad_file(sample, 0, EOFError("it is cut short"))
        return images

    def read_form(self, samples: np.ndarray, side: int) -> Any:
        # One array is fed in a fifth of the time that a list of paths takes; the system takes a
        # path to end at its first zero.
        folder = os.fsencode(self.folder)
        length = len(folder) + 1 + max(names.itemsize for names in self.columns.of_sides("names"))
        paths = np.char.add(folder, self.columns[f"names-{side}"][samples])
        return paths.astype(f"S{length}").view(np.uint8).reshape(len(samples), length)


def _unread(path: str, error: OSError) -> ReadError:
    """Return the error of a file that cannot be read, unless the machine is to blame."""
    return ReadError(f"{path} cannot be read ({reason_of(error, path)}); see to it, and resume")


class Pixels(Index):
    """Decoded images.

    The columns have `offsets`, (N,) int64: number of pixels of the inputs before each one; and for
    each side `pixels`: its images, flat and one after the other.
    """

    form = "pixels"

    def name_of(self, sample: int, side: int = 0) -> str:
        return f"sample {sample}"

    def read_part(
        self,
        sample: int,
        side: int,
        rectangle: Sequence[int],
        size: tuple[int, int],
        reduces: bool,
    ) -> np.ndarray:
        spec = self.sides[side]
        y, x, height, width = (spec.size_factor * length for length in rectangle)
        image = self._whole(sample, side)[y : y + height, x : x + width]
        return resize(image, size, spec.interpolation)

    def _whole(self, sample: int, side: int) -> np.ndarray:
        spec = self.sides[side]
        height, width = (spec.size_factor * length for length in self.sizes[sample].tolist())
        start = spec.per_pixel * int(self.columns["offsets"][sample])
        image = self.columns[f"pixels-{side}"][start : start + height * width * spec.channels]
        return image.reshape(height, width, spec.channels)

    def read_batch(self, samples: np.ndarray) -> np.ndarray | None:
        if len(self.sides) > 1 or len(self.distinct_sizes) > 1:
            return None
        [(height, width)] = self.distinct_sizes.tolist()
        offsets = self.columns["offsets"]
        images = self.columns["pixels-0"].reshape(len(offsets), height, width, -1)
        return images[offsets[samples] // (height * width)]

    def read_form(self, samples: np.ndarray, side: int) -> Any:
        whole = self.read_batch(samples)
        if whole is not None:
            return whole
        return [self._whole(sample, side) for sample in samples.tolist()]


def in_memory(name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> Index:
    """Make the index of uint8 images, (N, H, W) or (N, H, W, channels), and their (N,) labels."""
    sizes = np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1))
    offsets = np.arange(len(images)) * math.prod(images.shape[1:3])
    inputs = ImageSpec(math.prod(images.shape[3:]), "uint8", content="stored")
    target = Target("labels", labels.astype(np.int64), classes)
    columns = Columns({"sizes": sizes, "offsets": offsets, "pixels-0": images.ravel()})
    return Pixels(complete(columns, name, target, (inputs,)))
