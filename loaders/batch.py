"""Batches: any nesting of dicts and tuples around tensors and lists with one entry per sample; and
how they come from worker processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

from conf.errors import UserError


@dataclass(frozen=True)
class Batch:
    """Rows of the plan, and what was loaded of them."""

    rows: np.ndarray
    """(B,) of the plan's dtype; a bad sample's row is that of its substitute."""

    content: Any
    """Of images, a tuple with a Tensor (B, H, W, C) of uint8 or uint16 for each side; of own data,
    `(inputs, targets)`."""

    bad: dict[int, str] = field(default_factory=dict)
    """Reasons by sample why samples were replaced, or left out of an evaluation."""

    error: UserError | None = None
    """What ends the run: raised in a worker process, it would be shown with a traceback."""

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned memory, as a `DataLoader` with `pin_memory` asks for it."""
        pinned = map_leaves(lambda x: x.pin_memory() if isinstance(x, Tensor) else x, self.content)
        return replace(self, content=pinned)

    def share_memory(self) -> "Batch":
        """Move its tensors to shared memory. A `DataLoader`'s queue would do it in a thread, where
        a full /dev/shm loses the batch, and the training process waits for ever."""
        for tensor in tensors_of(self.content):
            tensor.share_memory_()
        return self


class Slots:
    """Shared memory in which workers send batches of images: slots that they use again and again.

    New memory for each batch costs a page fault for each of its pages, and a connection for each
    tensor: loader=pytorch then takes 1.1 times the CPU's time for photos and 1.9 times for digits.
    """

    def __init__(self, images: Sequence[Tensor], num_workers: int, num_per_worker: int) -> None:
        """Make slots for images like those of a whole batch; a worker overwrites a batch after so
        many others."""
        self.images, self.number = images, num_workers * num_per_worker
        self.num_per_worker, self.num_sent = num_per_worker, 0
        self.key = id(self)
        _slots[self.key] = self

    @cached_property
    def sides(self) -> list[Tensor]:
        """The memory, which is taken when the first worker starts."""
        return [x.new_empty(self.number, *x.shape).share_memory_() for x in self.images]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"images": (), "sides": self.sides}

    def send(self, batch: Batch) -> "Batch | _Sent":
        """Put the images of a worker's batch, if there are any, into its next slot."""
        if batch.content is None:
            return batch
        worker: Any = get_worker_info()
        slot = worker.id * self.num_per_worker + self.num_sent % self.num_per_worker
        self.num_sent += 1
        for side, images in zip(self.sides, batch.content, strict=True):
            side[slot, : len(images)] = images
        return _Sent(self.key, slot, replace(batch, content=None))


_slots: WeakValueDictionary[int, Slots] = WeakValueDictionary()
"""Those that this process receives batches in."""


class _Sent(NamedTuple):
    """A batch whose images are in a slot: pickled in a worker, it is unpickled as the batch."""

    key: int
    slot: int
    batch: Batch

    def __reduce__(self) -> Any:
        return _received, tuple(self)


def _received(key: int, slot: int, batch: Batch) -> Batch:
    content = tuple(side[slot, : len(batch.rows)] for side in _slots[key].sides)
    return replace(batch, content=content)


def map_leaves(function: Callable[[Any], Any], tree: Any, nested: Any = (dict, list, tuple)) -> Any:
    """Return values of the types `nested` with `function(value)` in place of each other value."""
    if not isinstance(tree, nested):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_leaves(function, value, nested) for key, value in tree.items()}
    values = [map_leaves(function, value, nested) for value in tree]
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def _leaves(tree: Any, nested: Any = (dict, list, tuple)) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, tree, nested)
    return found


def _has_samples(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def part(batch: Any, start: int, stop: int) -> Any:
    """Return the samples `start` to `stop` of a batch; values without samples stay as they are."""
    return map_leaves(lambda x: x[start:stop] if _has_samples(x) else x, batch, (dict, tuple))


def num_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor or list, else 0."""
    values = _leaves(batch, (dict, tuple))
    return next((len(value) for value in values if _has_samples(value) and len(value)), 0)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors in nested values."""
    return [value for value in _leaves(tree) if isinstance(value, Tensor)]
