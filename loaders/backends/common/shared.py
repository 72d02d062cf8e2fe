"""Batches that worker processes fill together, in memory that they share."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from loaders.backends.common.dataset import PlanDataset
from loaders.common import cpus_per_rank
from loaders.epoch import LoadedBatch, worker_loader
from loaders.plan import PlanSampler

MIN_ROWS = 64
"""Rows that a worker loads at once, or more: each time costs the training process about 0.1 ms."""


def default_workers(device: torch.device, num_samples: int, num_threads: int) -> int:
    """Return the number of worker processes where `loader.num_workers` is null.

    On a GPU there is one per CPU but one (per `num_threads` CPUs), for 64 samples or more: threads
    of the training process would hold up the one that launches kernels, since each call passes
    Python's interpreter lock around. On a CPU, which has no kernels to launch, there is none.
    """
    if device.type != "cuda":
        return 0
    return min((cpus_per_rank() - 1) // (num_threads or 1), -(-num_samples // MIN_ROWS))


class Part(NamedTuple):
    """Rows of a batch that one worker process loads."""

    slot: int
    """Place of the batch in the shared memory."""
    start: int
    """Position of the first row in the batch."""
    rows: np.ndarray


class Parts(Iterable[Part]):
    """The parts of the sampler's batches, `num_parts` of each, in turn in `num_slots` slots.

    Attributes:
        sent: rows of the batches whose parts were taken, the first one first.
    """

    def __init__(self, sampler: PlanSampler, num_parts: int, num_slots: int) -> None:
        self.sampler, self.num_parts, self.num_slots = sampler, num_parts, num_slots
        self.sent = deque[np.ndarray]()

    def __iter__(self) -> Iterator[Part]:
        self.sent.clear()
        for number, rows in enumerate(self.sampler):
            self.sent.append(rows)
            start = 0
            for part in np.array_split(rows, self.num_parts):
                yield Part(number % self.num_slots, start, part)
                start += len(part)


class PartDataset(Dataset[dict[int, str]]):
    """Dataset of worker processes: loads a part of a batch into `memory`, and returns the reasons
    of its bad samples."""

    memory: tuple[Tensor, ...] = ()
    """For each side (slots, B, height, width, C), in shared memory."""

    def __init__(self, dataset: PlanDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, part: Part) -> dict[int, str]:
        stop = part.start + len(part.rows)
        images = tuple(batches[part.slot, part.start : stop] for batches in self.memory)
        return self.dataset.load(part.rows, images).bad


class SharedBatches(Iterable[LoadedBatch]):
    """The sampler's batches, loaded by `num_workers` processes, `ahead` of them in advance.

    The processes share each batch, so that the first one is there soon and little memory is in use.
    A batch is valid until the one after the next is asked for.
    """

    def __init__(
        self, dataset: PlanDataset, sampler: PlanSampler, num_workers: int, ahead: int
    ) -> None:
        self.batch_size = sampler.global_batch_size // sampler.world_size
        num_parts = max(1, min(num_workers, self.batch_size // MIN_ROWS))
        # The batches in advance, the one that is returned next and the one in use.
        num_slots = -(-ahead * num_workers // num_parts) + 2
        self.parts, self.part_dataset = Parts(sampler, num_parts, num_slots), PartDataset(dataset)
        self.data_loader = worker_loader(self.part_dataset, self.parts, num_workers, ahead)

    def __iter__(self) -> Iterator[LoadedBatch]:
        if not self.part_dataset.memory:
            batches = self.part_dataset.dataset.new_batch(self.parts.num_slots, self.batch_size)
            self.part_dataset.memory = tuple(side.share_memory_() for side in batches)
        bad_samples, slot = iter(self.data_loader), 0
        for bad in bad_samples:
            for _ in range(self.parts.num_parts - 1):
                bad |= next(bad_samples)
            rows = self.parts.sent.popleft()
            images = tuple(batches[slot, : len(rows)] for batches in self.part_dataset.memory)
            yield LoadedBatch(rows, images, bad)
            slot = (slot + 1) % self.parts.num_slots
