"""Batches that worker processes fill together, in memory that they share with this process."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from loaders.backends.common.workers import MIN_ROWS
from loaders.epoch import EpochSampler, LoadedBatch, worker_loader

Load = Callable[[np.ndarray, tuple[Tensor, ...]], LoadedBatch]
"""Loads the images of rows into tensors, one for each side."""

Part = tuple[int, int, np.ndarray]
"""Rows that one process loads of a batch: the batch's slot in the memory, the position of the first
row in the batch, and the rows."""


class SharedBatches(Iterable[LoadedBatch]):
    """The sampler's batches, loaded by `num_workers` processes, `ahead` of them in advance.

    The processes share each batch, so that the first one is there soon and little memory is in use.
    A batch is valid until the one after the next is asked for.
    """

    def __init__(
        self,
        load: Load,
        new_batch: Callable[[int, int], tuple[Tensor, ...]],
        sampler: EpochSampler,
        num_workers: int,
        ahead: int,
    ) -> None:
        num_parts = max(1, min(num_workers, sampler.batch_size // MIN_ROWS))
        # The batches in advance, the one that is returned next and the one in use.
        num_slots = -(-ahead * num_workers // num_parts) + 2
        self.parts, self.loaded = Parts(sampler, num_parts, num_slots), PartDataset(load)
        self.new_batch = new_batch
        self.data_loader = worker_loader(self.loaded, self.parts, num_workers, ahead)

    def __iter__(self) -> Iterator[LoadedBatch]:
        parts, loaded = self.parts, self.loaded
        if not loaded.memory:
            batches = self.new_batch(parts.num_slots, parts.sampler.batch_size)
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

    sampler: EpochSampler
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

    load: Load
    memory: tuple[Tensor, ...] = ()
    """For each side (slots, B, height, width, C), in shared memory."""

    def __getitems__(self, part: Part) -> dict[int, str]:
        slot, start, rows = part
        images = tuple(batches[slot, start : start + len(rows)] for batches in self.memory)
        return self.load(rows, images).bad
