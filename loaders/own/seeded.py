"""A Dataset whose random numbers depend on seed, epoch and sample only."""

import errno
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from loaders.batch import tensors_of

MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
"""Errors that are no sample's fault."""


class LoadedBatch(NamedTuple):
    """The items of the rows of a batch."""

    rows: np.ndarray
    """Of dtype `loaders.epoch.SAMPLE`."""
    items: Any
    """(inputs, targets) on the CPU; None if any sample is bad."""
    bad: dict[int, str]
    """Reasons why samples cannot be loaded."""


class SeededDataset(Dataset[LoadedBatch]):
    """Dataset whose items are batches of rows; each row's seed is that of the generators of Python, NumPy and torch.

    So ordinary random transforms draw the same numbers in any process. The generators of the calling process,
    which draw dropout masks, are left as they were.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name
        self.collate_fn = getattr(data, "collate_fn", collate)

    def __getitems__(self, rows: np.ndarray) -> LoadedBatch:
        items, bad = [], {}
        with _generators_kept():
            for row in rows:
                sample, seed = int(row["sample"]), int(row["seed"])
                random.seed(seed)
                np.random.seed(seed)
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
                try:
                    items.append(self.data[sample])
                except Exception as error:  # a Dataset may raise errors of any type
                    if isinstance(error, MemoryError) or getattr(error, "errno", 0) in MACHINE:
                        raise
                    bad[sample] = f"{self.name}: sample {sample} cannot be loaded ({_told(error)})"
            batch = self.collate_fn(items) if items and not bad else None
        if get_worker_info() is not None:
            for tensor in tensors_of(batch):
                # The DataLoader's queue would move it in a thread, where a full /dev/shm loses the batch.
                tensor.share_memory_()
        return LoadedBatch(rows, batch, bad)


def collate(items: list[Any]) -> Any:
    """A batch by `default_collate`, with tuples as tuples: in a batch, a list has one entry for each sample."""
    return _with_tuples(items[0], default_collate(items))


def _with_tuples(item: Any, batch: Any) -> Any:
    if isinstance(item, dict):
        return {key: _with_tuples(item[key], batch[key]) for key in batch}
    if isinstance(item, str | bytes):
        return list(batch)
    if isinstance(item, tuple | list) and not hasattr(item, "_fields"):
        return tuple(map(_with_tuples, item, batch))
    return batch


@contextmanager
def _generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _told(error: Exception) -> str:
    """`ValueError: too small, mine.py:12`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    reason = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {reason}, {Path(last.filename).name}:{last.lineno}"
