"""The base class of loaders: batches in the order of a sampler, prepared in advance."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from loaders.common import DataInfo, explain, tensors_of, torch_threads
from loaders.epoch.sampler import SAMPLE, EpochSampler

Loaded = tuple[Any, Any]
"""Rows, and what was loaded of them or, transformed, their inputs and targets on the device."""

Transform = Callable[[Any, Any], Loaded]


class Loader:
    """Iterates over this rank's batches of one split: `(inputs, targets)` on its device.

    Both are any nesting of dicts and tuples around tensors and lists, see `loaders.common`. A
    training loader has the same number of batches on every rank. A subclass implements
    `finished_batches()`. Data without a sampler need a class of their own with `info`, `__iter__`
    and what follows it here.

    Attributes:
        info: facts about the samples.
        sampler: sampler of this rank's rows.
        batch_size: number of samples in a batch of this rank.
        samplers: samplers of all splits, this loader's first.
        position: number of rows of the epoch that all ranks together have used.
        last_rows: rows of the batch that was yielded last.
    """

    def __init__(self, sampler: EpochSampler, info: DataInfo) -> None:
        self.sampler, self.info, self.samplers = sampler, info, [sampler]
        self.batch_size = sampler.batch_size
        self.position = 0
        self.last_rows = np.zeros(0, SAMPLE)

    def finished_batches(self) -> Iterator[Loaded]:
        """Yield the rows of each batch, and its inputs and targets on the device."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches that are left of the epoch; of a whole one, if none is left."""
        if self.batches_done == self.max_batches:
            self.position = 0
        self.sampler.start_row = self.position
        try:
            for rows, batch in self.finished_batches():
                self.last_rows = rows
                # Before the batch is yielded: a checkpoint written in the loop's body comes after
                # the step that used it.
                self.position += self.sampler.global_batch_size
                yield batch
        except (OSError, RuntimeError) as error:
            explain(error)
            raise
        self.position = self.sampler.count  # the epoch is finished for any batch size

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return len(self.sampler)

    @property
    def epoch(self) -> int:
        """Current epoch."""
        return self.sampler.epoch

    @property
    def batches_done(self) -> int:
        """Number of batches of the current size already consumed in the epoch: at its end
        `max_batches`."""
        return min(-(-self.position // self.sampler.global_batch_size), self.max_batches)

    @property
    def max_batches(self) -> int:
        """Number of batches in a whole epoch of the rank that has most of them."""
        return self.sampler.max_batches

    @property
    def in_channels(self) -> int:
        """`info.in_channels`, for the scripts."""
        return self.info.in_channels

    @property
    def last_samples(self) -> Sequence[int]:
        """Numbers of the samples of the batch that was yielded last."""
        return self.last_rows["sample"].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0. The current epoch again keeps the position that was loaded."""
        if epoch != self.sampler.epoch:
            self.sampler.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch, for any number of ranks, as tensors and plain values that
        are equal on all ranks. Without the `plan`, a dict of texts, a checkpoint cannot continue
        within its epoch."""
        return {
            "epoch": self.sampler.epoch,
            "position": self.position,
            "plan": self._plan,
            "bad": [dict(sampler.bad) for sampler in self.samplers],
        }

    @cached_property
    def _plan(self) -> dict[str, str]:
        return self.sampler.description()  # the same at each save

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken, on any number of ranks."""
        self.sampler.epoch, self.position = state["epoch"], state["position"]
        self._add_bad(state.get("bad", []))

    def share_bad_samples(self, gather: Callable[[Any], list[Any]]) -> dict[str, int]:
        """Exchange the ranks' bad samples; return their number by split, {} if none can be bad.

        Args:
            gather: returns the values of all ranks.

        Raises:
            BadFileError: there are more than `data.max_bad_samples`.
        """
        for bad in gather([sampler.bad for sampler in self.samplers]):
            self._add_bad(bad)
        return {s.name.rpartition("/")[2]: s.num_bad for s in self.samplers}

    def _add_bad(self, found: list[dict[int, str]]) -> None:
        for sampler, bad in zip(self.samplers, found, strict=False):
            sampler.bad |= bad
            sampler.check_limit()


def results(futures: Iterable["Future[Any]"], num_ahead: int) -> Iterator[Any]:
    """Yield the results of futures in order, while `num_ahead` more of them are running."""
    running = deque["Future[Any]"]()
    try:
        for future in futures:
            running.append(future)
            if len(running) > num_ahead:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()


def transformed(
    batches: Iterable[Loaded], transform: Transform, num_threads: int
) -> Iterator[Loaded]:
    """Transform batches one in advance, in a thread that uses `num_threads` threads of torch."""
    pool = torch_threads(1, "transform", num_threads)
    try:
        yield from results((pool.submit(transform, *batch) for batch in batches), 1)
    finally:
        # Without waiting: the garbage collector may end this generator in the pool's own thread.
        pool.shutdown(wait=False)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device. There is one, because memory that was allocated on a
    stream is used again on that stream only."""
    return torch.cuda.Stream(device)


def prefetched(
    batches: Iterable[Loaded], transform: Transform, device: torch.device
) -> Iterator[Loaded]:
    """Copy and transform batches on a side stream while the training computes.

    The backend's own work on the device, such as DALI's, runs on the side stream too. The host is
    at most two batches ahead of the training's stream, which bounds the memory if steps are slow.
    """
    stream, waiting = _side_stream(device), iter(batches)
    ready: tuple[Loaded, torch.cuda.Event, Loaded] | None = None
    # Of each yielded batch: the event after which training is done with it, and its source.
    in_use: deque[tuple[torch.cuda.Event, Loaded]] = deque()
    while True:
        if len(in_use) == 2:
            in_use.popleft()[0].synchronize()
        with torch.cuda.stream(stream):
            raw = next(waiting, None)
            following = raw and (transform(*raw), stream.record_event(), raw)
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
