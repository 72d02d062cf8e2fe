"""Executes rows of the plan on the CPU: threads read, cut, resize and flip images into a batch.

Threads are enough, because decoding and resizing release Python's interpreter lock.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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


class PlanDataset:
    """Loads batches of rows of the plan: for each side the images, a Tensor (B, height, width, C)
    of the index's dtype.

    Args:
        index: index of the samples.
        sizes: (height, width) of the images by side; other sides are not loaded.
        num_threads: number of threads that load in this process.
        pin_memory: put the batches into pinned memory.
    """

    reduces = False
    """Large JPEGs are decoded at a fraction of their size."""

    def __init__(
        self,
        index: Index,
        sizes: dict[int, tuple[int, int]],
        num_threads: int,
        pin_memory: bool,
    ) -> None:
        self.index, self.sizes, self.num_threads = index, sizes, num_threads
        self.pin_memory = pin_memory
        self.sides, self.is_raw = index.sides, index.is_raw
        self.pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pool": None}

    @torch.inference_mode(False)  # whose tensors threads could not write to
    def load(self, rows: np.ndarray, images: tuple[Tensor, ...] = ()) -> LoadedBatch:
        """Load a batch, into `images` if these are given."""
        if self._is_copied(rows):
            return self._copy(rows, images)
        if self.num_threads > 1:
            return self.start(rows, images=images).result()
        batch = LoadedBatch(rows, images or self.new_batch(len(rows)), {})
        self._fill(batch, enumerate(rows[PLACE].tolist()))
        return batch

    @torch.inference_mode(False)
    def start(
        self,
        rows: np.ndarray,
        then: Callable[[LoadedBatch], Any] = lambda batch: batch,
        images: tuple[Tensor, ...] = (),
    ) -> "Future[Any]":
        """Begin with a batch in the threads, and return the future result of `then` of it.

        A free thread takes the next row; the first one that finds none waits for the others and
        calls `then`. Once the future is cancelled, no thread takes a further row.
        """
        if self.pool is None:
            # Operations of a thread are not split among further threads, which would take longer.
            self.pool = torch_threads(self.num_threads, "load", 1)
        if self._is_copied(rows):
            return self.pool.submit(lambda: then(self._copy(rows, images)))
        batch = LoadedBatch(rows, images or self.new_batch(len(rows)), {})
        places = enumerate(rows[PLACE].tolist())
        finished: Future[Any] | None = None

        def is_wanted(place: Any) -> bool:
            return finished is None or not finished.cancelled()

        def fill() -> None:
            self._fill(batch, takewhile(is_wanted, places))

        def finish() -> Any:
            for filled in fills:
                filled.result()
            return then(batch)

        fills = [self.pool.submit(fill) for _ in range(self.num_threads)]
        finished = self.pool.submit(finish)  # after all of `fill`, for which it waits
        return finished

    def _is_copied(self, rows: np.ndarray) -> bool:
        """Return True if the images need neither decoding nor resizing."""
        height, width = self.sizes.get(0, (0, 0))
        return self.is_raw and bool(
            (rows["height"] == height).all() and (rows["width"] == width).all()
        )

    @torch.inference_mode(False)
    def _copy(self, rows: np.ndarray, filled: tuple[Tensor, ...]) -> LoadedBatch:
        """Copy a batch where `_is_copied`, without further threads."""
        whole, bad = read_raw_batch(self.index, rows["sample"])
        images, (height, width) = torch.from_numpy(whole), self.sizes[0]
        if len(rows) and images.shape[1:3] != (height, width):
            corners = zip(rows["y"].tolist(), rows["x"].tolist(), strict=True)
            parts = zip(images, corners, strict=True)
            images = torch.stack([image[y : y + height, x : x + width] for image, (y, x) in parts])
        pixels = movable(images)
        for name, dim in [("vflip", 1), ("hflip", 2)]:
            if rows[name].any():
                flipped = torch.from_numpy(rows[name].copy())
                pixels[flipped] = pixels[flipped].flip(dim)
        if filled:
            movable(filled[0]).copy_(pixels)
            return LoadedBatch(rows, filled, bad)
        images = images.pin_memory() if self.pin_memory else images
        return LoadedBatch(rows, (images,), bad)

    @torch.inference_mode(False)
    def new_batch(self, *shape: int) -> tuple[Tensor, ...]:
        """Allocate the memory of a batch of this shape of samples, for each side."""
        batch = []
        for number, size in self.sizes.items():
            side = self.sides[number]
            whole, dtype = (*shape, *size, side.channels), getattr(torch, side.dtype)
            batch.append(torch.empty(whole, dtype=dtype, pin_memory=self.pin_memory))
        return tuple(batch)

    def _fill(self, batch: LoadedBatch, places: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Fill in the images of these positions in the batch, each with its values of `PLACE`."""
        arrays = [images.numpy() for images in batch.content]
        for position, (sample, y, x, height, width, *flips) in places:
            dims = [dim for dim in (0, 1) if flips[dim]]
            try:
                for number, filled in zip(self.sizes, arrays, strict=True):
                    factor = self.sides[number].size_factor
                    image = read_resized(
                        self.index,
                        sample,
                        number,
                        (factor * y, factor * x, factor * height, factor * width),
                        self.sizes[number],
                        self.reduces,
                    )
                    if dims:  # which takes NumPy ten times as long
                        flipped = movable(torch.from_numpy(image)).flip(dims)
                        image = flipped.numpy().view(image.dtype)
                    filled[position] = image
            except BadFileError as error:
                batch.bad[sample] = str(error)


def movable(images: Tensor) -> Tensor:
    """View an array as a dtype that torch can flip and index, which it cannot with uint16."""
    return images.view(torch.int16) if images.dtype == torch.uint16 else images
