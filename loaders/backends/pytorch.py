"""Loads in threads of this process, or of each worker process: they read, cut, resize and flip
images into a batch.

Threads are enough, because decoding and resizing release Python's interpreter lock.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from loaders.backends.common import Batch, ImageLoader, SharedBatches, default_workers
from loaders.common import cpus_per_rank, torch_threads
from loaders.epoch import LoadedBatch, results, transformed
from loaders.index import BadFileError, Index, share
from loaders.plan import PlanSampler

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
        whole, bad = self.index.read_raw_batch(rows["sample"])
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
                    image = self.index.read_resized(sample, side, rectangle, size, self.reduces)
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


class PyTorchLoader(ImageLoader):
    """Loads batches in `loader.num_threads` threads of this process, or of each worker process."""

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        index, is_gpu, ahead = self.index, device.type == "cuda", cfg.loader.prefetch_factor
        num_workers, num_threads = cfg.loader.num_workers, cfg.loader.num_threads
        if num_workers is None:
            # Images in memory that only have to be copied need none.
            num_samples = 0 if index.is_raw and not index.files else sampler.num_rows
            num_workers = default_workers(device, num_samples, num_threads)
        if num_workers and index.stored is None:
            self.columns = TemporaryDirectory(prefix="index-")
            index = share(index, Path(self.columns.name))
        num_threads = num_threads or max(1, cpus_per_rank() // max(1, num_workers))
        options = num_threads, is_gpu and not num_workers, cfg.data.reduced_decoding
        self.dataset = PlanDataset(index, self.read_sizes(), *options)
        self.shared: SharedBatches | None = None
        if num_workers:
            self.shared = SharedBatches(
                self.dataset.load, self.dataset.new_batch, sampler, num_workers, ahead
            )
        elif not is_gpu:
            # The threads that fill a batch: one more thread would take a CPU from them.
            self.dataset.transform = self.transform

    def finished_batches(self) -> Iterator[Batch]:
        by_threads = map(self.dataset.start, self.sampler)
        batches = self.shared or results(by_threads, self.cfg.loader.prefetch_factor)
        good = self.sampler.good_batches(batches, self.dataset.load)
        if self.dataset.transform is not None:
            return good
        if self.shared is not None and self.device.type == "cuda":
            good = transformed(good, _pinned, 1)
        return self.transform.finish(good)


def _pinned(rows: np.ndarray, images: tuple[Tensor, ...]) -> tuple[np.ndarray, tuple[Tensor, ...]]:
    return rows, tuple(side.pin_memory() for side in images)


def movable(images: Tensor) -> Tensor:
    """View an array as a dtype that torch can flip and index, which it cannot with uint16."""
    return images.view(torch.int16) if images.dtype == torch.uint16 else images
