"""Images that are decoded already, in memory or in files that are mapped into it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loaders.columns import Columns
from loaders.images import resize
from loaders.index import Index, Source, new_index
from loaders.targets import ImageSpec, Labels


class Pixels(Source):
    """Decoded images.

    The columns have `offsets`, (N,) int64: number of pixels of the inputs before each one; and for
    each side `pixels`: its images, flat and one after the other.
    """

    form = "pixels"

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns)
        sizes = columns["sizes"]
        self.has_one_size = "pixels-1" not in columns and bool((sizes == sizes[:1]).all())

    def _whole(self, sample: int, side: int, spec: ImageSpec) -> np.ndarray:
        size = self.columns["sizes"][sample].tolist()
        height, width = (spec.size_factor * length for length in size)
        start = spec.per_pixel * int(self.columns["offsets"][sample])
        image = self.columns[f"pixels-{side}"][start : start + height * width * spec.channels]
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
        image = self._whole(sample, side, spec)[y : y + height, x : x + width]
        return resize(image, size, spec.interpolation)

    def read_batch(self, samples: np.ndarray) -> np.ndarray | None:
        if not self.has_one_size:
            return None
        height, width = self.columns["sizes"][0].tolist()
        offsets = self.columns["offsets"]
        images = self.columns["pixels-0"].reshape(len(offsets), height, width, -1)
        return images[offsets[samples] // (height * width)]

    def read_form(self, samples: np.ndarray, side: int, spec: ImageSpec) -> Any:
        if self.has_one_size:
            return self.read_batch(samples)
        return [self._whole(sample, side, spec) for sample in samples.tolist()]


def in_memory(name: str, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> Index:
    """Make the index of uint8 images, (N, H, W) or (N, H, W, channels), and their (N,) labels."""
    sizes = np.tile(np.array(images.shape[1:3], np.int32), (len(images), 1))
    offsets = np.arange(len(images)) * math.prod(images.shape[1:3])
    inputs = ImageSpec(math.prod(images.shape[3:]), "uint8", content="stored")
    target = Labels(labels.astype(np.int64), classes)
    columns = Columns({"sizes": sizes, "offsets": offsets, "pixels-0": images.ravel()})
    return new_index(name, target, inputs, Pixels(columns))
