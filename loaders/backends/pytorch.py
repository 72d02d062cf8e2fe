"""Threads of the training process, or worker processes of PyTorch's DataLoader, as the backend."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from conf.schema import Config
from loaders.backends.common import MIN_ROWS, Batch, ImageLoader, PlanDataset, default_workers
from loaders.common import cpus_per_rank
from loaders.epoch import LoadedBatch, results, transformed, worker_loader
from loaders.index import StoredIndex, share
from loaders.plan import PlanSampler

Part = tuple[int, int, np.ndarray]
"""Rows that one process loads of a batch: the batch's slot in the memory, the position of the first
row in the batch, and the rows."""


class PyTorchLoader(ImageLoader):
    """Loads batches in `loader.num_threads` threads of this process, or of each worker process."""

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        index, is_gpu, ahead = self.index, device.type == "cuda", cfg.loader.prefetch_factor
        num_workers, num_threads = cfg.loader.num_workers, cfg.loader.num_threads
        if num_workers is None:
            # Images in memory that only have to be copied need none.
            num_samples = 0 if index.is_raw and index.pixels else sampler.num_rows
            num_workers = default_workers(device, num_samples, num_threads)
        if num_workers and not isinstance(index, StoredIndex):
            self.columns = TemporaryDirectory(prefix="index-")
            index = share(index, Path(self.columns.name))
        num_threads = num_threads or max(1, cpus_per_rank() // max(1, num_workers))
        options = num_threads, is_gpu and not num_workers, cfg.data.reduced_decoding
        self.dataset = PlanDataset(index, self.read_sizes(), *options)
        self.shared: SharedBatches | None = None
        if num_workers:
            self.shared = SharedBatches(self.dataset, sampler, num_workers, ahead)
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


class SharedBatches(Iterable[LoadedBatch]):
    """The sampler's batches, loaded by `num_workers` processes, `ahead` of them in advance.

    The processes share each batch, so that the first one is there soon and little memory is in use.
    A batch is valid until the one after the next is asked for.
    """

    def __init__(
        self, dataset: PlanDataset, sampler: PlanSampler, num_workers: int, ahead: int
    ) -> None:
        num_parts = max(1, min(num_workers, sampler.batch_size // MIN_ROWS))
        # The batches in advance, the one that is returned next and the one in use.
        num_slots = -(-ahead * num_workers // num_parts) + 2
        self.parts, self.loaded = Parts(sampler, num_parts, num_slots), PartDataset(dataset)
        self.data_loader = worker_loader(self.loaded, self.parts, num_workers, ahead)

    def __iter__(self) -> Iterator[LoadedBatch]:
        parts, loaded = self.parts, self.loaded
        if not loaded.memory:
            batches = loaded.dataset.new_batch(parts.num_slots, parts.sampler.batch_size)
            loaded.memory = tuple(side.share_memory_() for side in batches)
        bad_samples, slot = iter(self.data_loader), 0
        for bad in bad_samples:
            for _ in range(parts.num_parts - 1):
                bad |= next(bad_samples)
            rows = parts.sent.popleft()
            yield LoadedBatch(rows, tuple(side[slot, : len(rows)] for side in loaded.memory), bad)
            slot = (slot + 1) % parts.num_slots


@dataclass
class Parts(Iterable[Part]):
    """The parts of the sampler's batches, `num_parts` of each, in turn in `num_slots` slots."""

    sampler: PlanSampler
    num_parts: int
    num_slots: int
    sent: deque[np.ndarray] = field(default_factory=deque)
    """Rows of the batches whose parts were taken, the first one first."""

    def __iter__(self) -> Iterator[Part]:
        self.sent.clear()
        for number, rows in enumerate(self.sampler):
            self.sent.append(rows)
            start = 0
            for part in np.array_split(rows, self.num_parts):
                yield number % self.num_slots, start, part
                start += len(part)


@dataclass
class PartDataset(Dataset[dict[int, str]]):
    """Dataset of worker processes: loads a part of a batch into `memory`, and returns the reasons
    of its bad samples."""

    dataset: PlanDataset
    memory: tuple[Tensor, ...] = ()
    """For each side (slots, B, height, width, C), in shared memory."""

    def __getitems__(self, part: Part) -> dict[int, str]:
        slot, start, rows = part
        images = tuple(batches[slot, start : start + len(rows)] for batches in self.memory)
        return self.dataset.load(rows, images).bad
