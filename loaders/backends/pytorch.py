"""Threads of the training process, or those of PyTorch's DataLoader, as the backend."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from loaders.backends.common import (
    Batch,
    ImageLoader,
    PlanDataset,
    RawBatch,
    SharedBatches,
    default_workers,
)
from loaders.common import cpus_per_rank
from loaders.epoch import LoadedBatch, transformed
from loaders.index import StoredIndex, share
from loaders.plan import PlanSampler


class PyTorchLoader(ImageLoader):
    """Loads batches in `loader.num_threads` threads of this process, or of each worker process."""

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        index, options, pin_memory = self.index, cfg.loader, device.type == "cuda"
        num_threads = options.num_threads or cpus_per_rank()
        num_workers = options.num_workers
        if num_workers is None:
            # Images in memory that only have to be copied need none.
            num_samples = 0 if index.is_raw and index.pixels else sampler.num_rows
            num_workers = default_workers(device, num_samples, options.num_threads)
        self.shared: SharedBatches | None = None
        if num_workers:
            num_threads = options.num_threads or max(1, cpus_per_rank() // num_workers)
            pin_memory = False  # `_pinned` does it
        if num_workers and not isinstance(index, StoredIndex):
            self.columns = TemporaryDirectory(prefix="index-")
            index = share(index, Path(self.columns.name))
        self.dataset = PlanDataset(index, self.read_sizes(), num_threads, pin_memory)
        self.dataset.reduces = cfg.data.reduced_decoding
        if num_workers:
            ahead = options.prefetch_factor
            self.shared = SharedBatches(self.dataset, sampler, num_workers, ahead)

    def finished_batches(self) -> Iterator[Batch]:
        if self.shared is None and self.device.type == "cpu":
            return self._transformed_by_threads()
        batches = self._by_threads(lambda batch: batch) if self.shared is None else self.shared
        good = self.good_batches(batches, self.dataset.load)
        if self.shared is not None and self.device.type == "cuda":
            good = transformed(good, _pinned, 1)
        return self.finish(good)

    def _transformed_by_threads(self) -> Iterator[Batch]:
        # The threads that fill a batch transform it: one more thread would take a CPU from them.
        for batch in self._by_threads(self._transform_good):
            if isinstance(batch, LoadedBatch):  # with bad samples
                for good in self.good_batches([batch], self.dataset.load):
                    yield self.transform(*good)
            else:
                yield batch

    def _by_threads(self, then: Callable[[LoadedBatch], Any]) -> Iterator[Any]:
        """Yield `then(batch)` of each batch while threads load `loader.prefetch_factor` more."""
        started = deque[Future[Any]]()
        try:
            for rows in self.sampler:
                started.append(self.dataset.start(rows, then))
                if len(started) > self.cfg.loader.prefetch_factor:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:
            for future in started:
                future.cancel()

    def _transform_good(self, batch: LoadedBatch) -> LoadedBatch | Batch:
        return batch if batch.bad else self.transform(batch.rows, batch.content)


def _pinned(rows: np.ndarray, images: tuple[Tensor, ...]) -> RawBatch:
    return rows, tuple(side.pin_memory() for side in images)
