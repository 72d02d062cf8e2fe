"""A Dataset whose random numbers depend on seed, epoch and sample only."""

import errno
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from conf.errors import UserError, told
from loaders.common import map_leaves
from loaders.epoch import LoadedBatch

MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
"""Errors that are no sample's fault."""


class SeededDataset(Dataset[LoadedBatch]):
    """Dataset whose items are batches of rows; each row's seed is set in Python, NumPy and torch.

    The content of a batch is (inputs, targets) on the CPU, or a UserError if the samples fit into
    no batch: raised in a worker process, it would be shown with a traceback.

    So ordinary random transforms draw the same numbers in any process. The generators of the
    calling process, which draw dropout masks, are left as they were.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name
        self.collate_fn = getattr(data, "collate_fn", None) or collate

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
                    reason = _told_of_sample(error)
                    bad[sample] = f"{self.name}: sample {sample} cannot be loaded ({reason})"
            batch: Any = None
            if items and not bad:
                try:
                    batch = self.collate_fn(items)
                except Exception as error:
                    reason = _told_of_sample(error)
                    batch = self._misfit(rows["sample"].tolist(), items, reason)
        return LoadedBatch(rows, batch, bad)

    def _misfit(self, samples: list[int], items: list[Any], reason: str) -> UserError:
        shapes = [str(map_leaves(_shape_of, item)) for item in items]
        other = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), 0)
        described = f"sample {samples[0]} is {shapes[0]}"
        if other:
            described += f", sample {samples[other]} is {shapes[other]}"
        return UserError(
            f"{self.name}: the samples do not form a batch ({reason}): {described}; "
            "return dicts, tuples and tensors of the same shape, or give the Dataset a collate_fn"
        )


def collate(items: Sequence[Any]) -> Any:
    """Collate by `default_collate`; tuples stay tuples, since a list has one entry per sample."""
    first = items[0]
    if isinstance(first, dict):
        return {key: collate([item[key] for item in items]) for key in first}
    if isinstance(first, str | bytes):
        return list(items)
    if isinstance(first, tuple | list):
        values = map(collate, zip(*items, strict=True))
        return type(first)(*values) if hasattr(first, "_fields") else tuple(values)
    return default_collate(list(items))


def _shape_of(value: Any) -> str:
    """Return `float32 (3, 32, 32)` of a tensor or an array, else the name of the type."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


@contextmanager
def _generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _told_of_sample(error: Exception) -> str:
    """Return an error in words; raise it again if the machine is to blame, and not a sample."""
    if isinstance(error, MemoryError) or getattr(error, "errno", 0) in MACHINE:
        raise error
    return told(error)
