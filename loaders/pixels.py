"""Decoded images, in memory or in files that are mapped into it."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from loaders.columns import Columns
from loaders.images import resize
from loaders.index import Index, complete, cut
from loaders.targets import ImageSpec, Target


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

    @cached_property
    def equal_inputs(self) -> np.ndarray | None:
        """All inputs as one array, (images, height, width, C), if they have one size."""
        if len(self.distinct_sizes) > 1:
            return None
        shape = *self.distinct_sizes[0].tolist(), self.inputs.channels
        return self.columns["pixels-0"].reshape(-1, *shape)

    def _numbers(self, samples: np.ndarray) -> np.ndarray:
        """Return the places of samples in `equal_inputs`."""
        return self.columns["offsets"][samples] // self.distinct_sizes[0].prod()

    def read_batch(self, rows: np.ndarray, size: tuple[int, int]) -> np.ndarray | None:
        images = self.equal_inputs
        if images is None or len(self.sides) > 1:
            return None
        numbers = self._numbers(rows["sample"])
        if images.shape[1:3] == size:
            return images[numbers]
        return cut((images[number] for number in numbers), rows, size)

    def read_form(self, samples: np.ndarray, side: int) -> Any:
        if self.equal_inputs is not None and len(self.sides) == 1:
            return self.equal_inputs[self._numbers(samples)]
        return [self._whole(sample, side) for sample in samples.tolist()]


def in_memory(name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> Index:
    """Make the index of uint8 images, (N, H, W) or (N, H, W, channels), and their (N,) labels."""
    sizes = np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1))
    offsets = np.arange(len(images)) * math.prod(images.shape[1:3])
    inputs = ImageSpec(math.prod(images.shape[3:]), "uint8", content="stored")
    target = Target("labels", labels.astype(np.int64), classes)
    columns = Columns({"sizes": sizes, "offsets": offsets, "pixels-0": images.ravel()})
    return Pixels(complete(columns, name, target, (inputs,)))
