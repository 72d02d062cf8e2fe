"""Images that are decoded already, in memory or in files that are mapped into it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loaders.columns import open_column
from loaders.images import resize
from loaders.index import Index, Source, new_index
from loaders.targets import ImageSpec, Labels


class Pixels(Source):
    """Decoded images.

    Args:
        sizes: (N, 2) int: height and width of the inputs.
        offsets: (N,) int64: number of pixels of the inputs before each one.
        pixels: images of each side, flat and one after the other.
        folder: folder of these columns; None: they are in memory.
    """

    form = "pixels"

    def __init__(
        self,
        sizes: np.ndarray,
        offsets: np.ndarray,
        pixels: tuple[np.ndarray, ...],
        folder: Path | None = None,
    ) -> None:
        self.sizes, self.offsets, self.pixels, self.folder = sizes, offsets, pixels, folder
        self.has_one_size = len(pixels) == 1 and bool((sizes == sizes[:1]).all())

    def __reduce__(self) -> Any:
        return open_pixels, (self.folder,)

    def read(self, sample: int, side: int, spec: ImageSpec) -> np.ndarray:
        height, width = (spec.size_factor * int(length) for length in self.sizes[sample])
        start = spec.per_pixel * int(self.offsets[sample])
        image = self.pixels[side][start : start + height * width * spec.channels]
        return image.reshape(height, width, spec.channels)

    def read_part(
        self,
        sample: int,
        side: int,
        spec: ImageSpec,
        rectangle: Sequence[int],
        size: tuple[int, int],
        reduces: bool,
    ) -> np.ndarray:
        y, x, height, width = (spec.size_factor * length for length in rectangle)
        image = self.read(sample, side, spec)[y : y + height, x : x + width]
        return resize(image, size, spec.interpolation)

    def read_batch(self, samples: np.ndarray) -> np.ndarray | None:
        if not self.has_one_size:
            return None
        height, width = self.sizes[0].tolist()
        images = self.pixels[0].reshape(len(self.offsets), height, width, -1)
        return images[self.offsets[samples] // (height * width)]

    def read_form(self, samples: np.ndarray, side: int, spec: ImageSpec) -> Any:
        images = self.read_batch(samples)
        return [self.read(n, side, spec) for n in samples.tolist()] if images is None else images

    def identity(self) -> list[np.ndarray]:
        return [*self.pixels]

    def columns(self) -> dict[str, np.ndarray]:
        named = {f"pixels-{side}": pixels for side, pixels in enumerate(self.pixels)}
        return named | {"offsets": self.offsets}

    def opened(self, folder: Path) -> "Pixels":
        return open_pixels(folder)


def open_pixels(folder: Path) -> Pixels:
    """Map the decoded images of a folder into memory.

    Raises:
        UserError: a file is missing or damaged.
    """
    num_sides = max(1, len(list(folder.glob("pixels-*.npy"))))
    pixels = [open_column(folder / f"pixels-{side}.npy") for side in range(num_sides)]
    sizes, offsets = open_column(folder / "sizes.npy"), open_column(folder / "offsets.npy")
    return Pixels(sizes, offsets, tuple(pixels), folder)


def in_memory(name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> Index:
    """Make the index of uint8 images, (N, H, W) or (N, H, W, channels), and their (N,) labels."""
    sizes = np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1))
    offsets = np.arange(len(images)) * math.prod(images.shape[1:3])
    inputs = ImageSpec(math.prod(images.shape[3:]), "uint8", content="stored")
    target = Labels(labels.astype(np.int64), classes)
    return new_index(name, sizes, target, inputs, Pixels(sizes, offsets, (images.ravel(),)))
