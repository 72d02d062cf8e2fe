"""Iteration over batches on the device, prepared in advance."""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from itertools import repeat, takewhile
from typing import Any

import numpy as np
import torch

from loaders.batch import Batch, tensors_of
from loaders.info import DataInfo
from loaders.limits import torch_threads
from loaders.plan import Plan

log = logging.getLogger(__name__)


class Loader:
    """Iterates over this rank's batches of one split: `(inputs, targets)` on its device.

    Both are any nesting of dicts and tuples around tensors and lists, see `loaders.batch`. Of
    images, inputs are float32 (B, C, H, W), and targets as `info.target` says; with `data.mixup` or
    `data.cutmix`, labels of training batches are (B, classes) float32 probabilities. A training
    loader has the same number of batches on every rank.

    Args:
        batches: yields what is left of the plan's epoch, each time it is iterated over.
        transform: makes inputs and targets of a batch, on the device.
        num_threads: threads that transform batches on a CPU, each one in advance; 0: the calling
            thread does it.
        num_ahead: batches that a thread loads in advance; 0: the calling thread loads them.

    Attributes:
        last_rows: rows of the batch that was yielded last.
        bad: reasons by sample why samples were replaced or left out on this rank.
    """

    def __init__(
        self,
        plan: Plan,
        batches: Iterable[Batch],
        transform: Callable[[Batch], tuple[Any, Any]],
        info: DataInfo,
        device: torch.device,
        num_threads: int = 0,
        num_ahead: int = 0,
    ) -> None:
        self.plan, self.batches, self.transform, self.info = plan, batches, transform, info
        self.device, self.batch_size = device, plan.batch_size
        self.num_threads, self.num_ahead = num_threads, num_ahead
        self.last_rows = np.zeros(0, [("sample", "i8")])
        self.bad: dict[int, str] = {}

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches that are left of the epoch; of a whole one, if none is left, and in
        evaluation always."""
        if not self.plan.samples.train or self.batches_done == self.max_batches:
            self.plan.begin(self.epoch)
        for rows, batch in self._finished_batches():
            # Before the batch is yielded: a checkpoint written in the loop's body comes after the
            # step that used it.
            self.plan.advance()
            if len(rows):
                self.last_rows = rows
                yield batch
        self.plan.finish()

    def _finished_batches(self) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield rows of each batch, and its inputs and targets."""
        batches = iter(self.batches)
        if self.num_ahead:
            ahead = in_threads(lambda _: next(batches, None), repeat(None), 1, self.num_ahead)
            loaded = map(self._checked, takewhile(lambda batch: batch is not None, ahead))
        else:
            loaded = map(self._checked, batches)
        if self.device.type == "cuda":
            return prefetched(loaded, self._finish, self.device)
        if self.num_threads == 0:
            return map(self._finish, loaded)
        return in_threads(self._finish, loaded, self.num_threads, self.num_threads)

    def _checked(self, batch: Batch) -> Batch:
        if batch.error is not None:
            raise batch.error
        for sample in batch.bad.keys() - self.bad.keys():
            done = "replaced" if self.plan.samples.train else "left out"
            log.warning("%s (%s)", batch.bad[sample], done)
        self.bad |= batch.bad
        return batch

    def _finish(self, batch: Batch) -> tuple[np.ndarray, Any]:
        return batch.rows, self.transform(batch) if len(batch.rows) else None

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return len(self.plan)

    @property
    def epoch(self) -> int:
        """Current epoch."""
        return self.plan.epoch

    @property
    def batches_done(self) -> int:
        """See `Plan.batches_done`."""
        return self.plan.batches_done

    @property
    def max_batches(self) -> int:
        """Number of batches in a whole epoch of the rank that has most of them."""
        return self.plan.max_batches

    @property
    def in_channels(self) -> int:
        """`info.in_channels`, for the scripts."""
        return self.info.in_channels

    @property
    def last_samples(self) -> Sequence[int]:
        """Numbers of the samples of the batch that was yielded last."""
        return self.last_rows["sample"].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0. The current epoch again keeps the place that was loaded."""
        if epoch != self.epoch:
            self.plan.begin(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, for any number of ranks, as plain values that are equal on
        all ranks; `plan`, a dict of texts, says what the order depends on."""
        return self.plan.state_dict()

    def state_at(self, epoch: int, is_finished: bool) -> dict[str, Any]:
        """Return the state at the start of an epoch, or at its end."""
        plan = copy.copy(self.plan)
        plan.begin(epoch)
        if is_finished:
            plan.finish()
        return plan.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken, on any number of ranks."""
        self.plan.load_state_dict(state)


def in_threads(
    function: Callable[[Any], Any], items: Iterable[Any], num_threads: int, num_ahead: int
) -> Iterator[Any]:
    """Yield what a function makes of items, each in one of the threads, in their order and
    `num_ahead` in advance."""
    pool, running = torch_threads(num_threads, "batches"), deque[Future[Any]]()
    try:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > num_ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        # Without waiting: the garbage collector may end this generator in the pool's thread.
        pool.shutdown(wait=False, cancel_futures=True)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a device: memory that was allocated on a stream is used again
    on that stream only."""
    return torch.cuda.Stream(device)


def prefetched(
    batches: Iterable[Batch], finish: Callable[[Batch], Any], device: torch.device
) -> Iterator[Any]:
    """Copy and transform batches on a side stream while the training computes.

    The backend's own work on the device, such as DALI's, runs on the side stream too. The host is
    at most two batches ahead of the training's stream, which bounds the memory if steps are slow.
    """
    stream, waiting = _side_stream(device), iter(batches)
    ready: tuple[Any, torch.cuda.Event, Batch] | None = None
    # Of each yielded batch: the event after which training is done with it, and its source.
    in_use: deque[tuple[torch.cuda.Event, Batch]] = deque()
    while True:
        if len(in_use) == 2:
            in_use.popleft()[0].synchronize()
        with torch.cuda.stream(stream):
            raw = next(waiting, None)
            following = None if raw is None else (finish(raw), stream.record_event(), raw)
        if ready is not None:
            batch, is_ready, source = ready
            training = torch.cuda.current_stream(device)
            training.wait_event(is_ready)
            for tensor in tensors_of(batch[1]):
                # Keeps its memory from reuse before the training's stream is done with it.
                tensor.record_stream(training)
            yield batch
            in_use.append((_blocking_event(torch.cuda.current_stream(device)), source))
        if following is None:
            break
        ready = following
    _blocking_event(stream).synchronize()  # before the last sources are freed


def _blocking_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event for which the host sleeps: busy waiting would take a CPU from the loader."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
