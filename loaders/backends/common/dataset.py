"""Executes rows of the plan on the CPU: threads read, cut, resize and flip images into a batch.

Threads are enough, because decoding and resizing release Python's interpreter lock.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loaders.common import torch_threads
from loaders.epoch import LoadedBatch
from loaders.index import BadFileError, Index, read_raw_batch, read_resized

PLACE = ["sample", "y", "x", "height", "width", "vflip", "hflip"]
"""Columns of the rows that say what is read."""


@dataclass(eq=False)
class PlanDataset:
    """Loads batches of rows of the plan: for each side the images, a Tensor (B, height, width, C)
    of the index's dtype."""

    index: Index

    sizes: dict[int, tuple[int, int]]
    """(height, width) of the images by side; other sides are not loaded."""

    num_threads: int
    """Threads of this process that load."""

    pin_memory: bool

    reduces: bool
    """Large JPEGs are decoded at a fraction of their size."""

    transform: Callable[[np.ndarray, Any], tuple[np.ndarray, Any]] | None = None
    """Makes the content of a good batch of its rows and images."""

    def __post_init__(self) -> None:
        # Operations of a thread are not split among further threads, which would take longer.
        self.pool = torch_threads(self.num_threads, "load", 1)

    def __reduce__(self) -> Any:
        options = self.num_threads, self.pin_memory, self.reduces
        return PlanDataset, (self.index, self.sizes, *options)

    @torch.inference_mode(False)  # whose tensors threads could not write to
    def load(self, rows: np.ndarray, images: tuple[Tensor, ...] = ()) -> LoadedBatch:
        """Load a batch, into `images` if these are given."""
        if self._is_copied(rows):
            return self._finished(self._copied(rows, images))
        if self.num_threads > 1:
            return self.start(rows, images).result()
        batch = LoadedBatch(rows, images or self.new_batch(len(rows)), {})
        self._fill(batch, enumerate(rows[PLACE].tolist()))
        return self._finished(batch)

    def start(self, rows: np.ndarray, images: tuple[Tensor, ...] = ()) -> "Future[LoadedBatch]":
        """Begin with a batch in the threads.

        A free thread takes the next row; the first one that finds none waits for the others. Once
        the future is cancelled, no thread takes a further row.
        """
        if self._is_copied(rows):
            return self.pool.submit(self.load, rows, images)
        batch = LoadedBatch(rows, images or self.new_batch(len(rows)), {})
        places = enumerate(rows[PLACE].tolist())
        finished: Future[LoadedBatch] | None = None

        def is_wanted(place: Any) -> bool:
            return finished is None or not finished.cancelled()

        def fill() -> None:
            self._fill(batch, takewhile(is_wanted, places))

        def finish() -> LoadedBatch:
            for filled in fills:
                filled.result()
            return self._finished(batch)

        fills = [self.pool.submit(fill) for _ in range(self.num_threads)]
        finished = self.pool.submit(finish)  # after all of `fill`, for which it waits
        return finished

    @torch.inference_mode(False)
    def new_batch(self, *shape: int) -> tuple[Tensor, ...]:
        """Allocate the memory of a batch of this shape of samples, for each side."""
        batch = []
        for number, size in self.sizes.items():
            side = self.index.sides[number]
            whole, dtype = (*shape, *size, side.channels), getattr(torch, side.dtype)
            batch.append(torch.empty(whole, dtype=dtype, pin_memory=self.pin_memory))
        return tuple(batch)

    def _is_copied(self, rows: np.ndarray) -> bool:
        """Return True if the images need neither decoding nor resizing."""
        height, width = self.sizes.get(0, (0, 0))
        is_size = (rows["height"] == height) & (rows["width"] == width)
        return self.index.is_raw and bool(is_size.all())

    def _copied(self, rows: np.ndarray, filled: tuple[Tensor, ...]) -> LoadedBatch:
        """Copy a batch where `_is_copied`, without further threads."""
        whole, bad = read_raw_batch(self.index, rows["sample"])
        images, (height, width) = torch.from_numpy(whole), self.sizes[0]
        if len(rows) and images.shape[1:3] != (height, width):
            corners = zip(images, rows["y"].tolist(), rows["x"].tolist(), strict=True)
            images = torch.stack([image[y : y + height, x : x + width] for image, y, x in corners])
        pixels = movable(images)
        for name, dim in [("vflip", 1), ("hflip", 2)]:
            if rows[name].any():
                flipped = torch.from_numpy(rows[name].copy())
                pixels[flipped] = pixels[flipped].flip(dim)
        if filled:
            movable(filled[0]).copy_(pixels)
            return LoadedBatch(rows, filled, bad)
        return LoadedBatch(rows, (images.pin_memory() if self.pin_memory else images,), bad)

    def _fill(self, batch: LoadedBatch, places: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Fill in the images of these positions in the batch, each with its values of `PLACE`."""
        arrays = [images.numpy() for images in batch.content]
        for position, (sample, *rectangle, vflip, hflip) in places:
            dims = [dim for dim, flips in enumerate((vflip, hflip)) if flips]
            try:
                for (side, size), filled in zip(self.sizes.items(), arrays, strict=True):
                    image = read_resized(self.index, sample, side, rectangle, size, self.reduces)
                    if dims:  # which takes NumPy ten times as long
                        flipped = movable(torch.from_numpy(image)).flip(dims)
                        image = flipped.numpy().view(image.dtype)
                    filled[position] = image
            except BadFileError as error:
                batch.bad[sample] = str(error)

    def _finished(self, batch: LoadedBatch) -> LoadedBatch:
        if self.transform is None or batch.bad or not len(batch.rows):
            return batch
        return batch._replace(content=self.transform(batch.rows, batch.content)[1])


def movable(images: Tensor) -> Tensor:
    """View an array as a dtype that torch can flip and index, which it cannot with uint16."""
    return images.view(torch.int16) if images.dtype == torch.uint16 else images
