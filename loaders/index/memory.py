"""The index of decoded images in memory, or in files that are mapped into it."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loaders.images import resize
from loaders.index.index import Index


@dataclass(frozen=True, kw_only=True)
class MemoryIndex(Index):
    """The samples of one split, whose images are decoded."""

    pixels: tuple[np.ndarray, ...]
    """Images of each side, flat and one after the other."""

    offsets: np.ndarray
    """(N,) int64: number of pixels of the inputs before each one in `pixels`."""

    def identity(self) -> list[np.ndarray]:
        return [*self.pixels]

    @functools.cached_property
    def is_raw(self) -> bool:
        return self.has_one_shape and not self.resized

    def name_of(self, sample: int) -> str:
        return f"sample {sample}"

    def read_image(self, sample: int, side: int = 0) -> np.ndarray:
        spec = self.sides[side]
        height, width = (spec.size_factor * int(length) for length in self.sizes[sample])
        start = spec.per_pixel * int(self.offsets[sample])
        image = self.pixels[side][start : start + height * width * spec.channels]
        return image.reshape(height, width, spec.channels)

    def read_resized(
        self,
        sample: int,
        side: int,
        rectangle: Sequence[int],
        size: tuple[int, int],
        reduces: bool,
    ) -> np.ndarray:
        spec = self.sides[side]
        y, x, height, width = (spec.size_factor * length for length in rectangle)
        image = self.read_image(sample, side)[y : y + height, x : x + width]
        return resize(image, size, spec.interpolation)

    def read_raw_batch(self, samples: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        shape = *self.distinct_sizes[0].tolist(), self.channels
        pixels, length = self.pixels[0], math.prod(shape)
        images = pixels[: len(pixels) // length * length].reshape(-1, *shape)
        return images[self.offsets[samples] // math.prod(shape[:2])], {}
