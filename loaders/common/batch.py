"""Batches: any nesting of dicts and tuples around tensors and lists with one entry per sample."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested dicts, lists and tuples with `function(value)` in place of each other value."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [map_leaves(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return function(tree)


def part(batch: Any, start: int, stop: int) -> Any:
    """Return the samples `start` to `stop` of a batch; values without samples stay as they are."""
    if isinstance(batch, dict):
        return {key: part(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, tuple):
        parts = [part(value, start, stop) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list) or (isinstance(batch, Tensor) and batch.ndim):
        return batch[start:stop]
    return batch


def num_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor or list, else 0."""
    if isinstance(batch, dict | tuple):
        values = batch.values() if isinstance(batch, dict) else batch
        return next((count for value in values if (count := num_samples(value))), 0)
    if isinstance(batch, list) or (isinstance(batch, Tensor) and batch.ndim):
        return len(batch)
    return 0


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Return all tensors in nested values."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_of(value)
