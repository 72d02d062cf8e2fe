"""Iteration over batches on the device, prepared in advance."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loaders.batch import Batch, tensors_of
from loaders.limits import torch_threads
from loaders.plan import Plan
from loaders.targets import Target

log = logging.getLogger(__name__)


@dataclass
class DataInfo:
    """Facts about the samples of a split, all optional."""

    description: tuple[str, ...] = ()
    """Lines for the log: the data set, numbers of samples, classes."""

    target: Target | None = None
    """Kind of the targets; None: unknown, and the task has to say its number of outputs itself."""

    in_channels: int = 1
    """Channels of the inputs, for models of images."""

    dtype: str = "float32"
    """Type of the inputs as they are stored, such as `uint8`."""

    num_samples: int = 0

    num_val_samples: int = 0
    """Of the validation split, which a training loader is compared on; `build_loaders` sets it."""

    num_dropped: int = 0
    """Samples that training drops at the end of each epoch."""

    example: Any = None
    """Inputs of a batch of one sample, with any values: for the model on ranks without samples."""

    name_of: Callable[[int], str] = "sample {}".format
    """Name of a sample, for messages and tables."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Files that are no samples, as their headers are bad, and why."""

    has_files: bool = False
    """Names are paths, which `data.leave_out` can list."""

    pictures: Callable[[Any], Tensor | None] = lambda inputs: None
    """Inputs as pictures: 1 or 3 channels with values in [0, 1]; None: they are not images."""

    class_counts: Callable[[], np.ndarray | None] = lambda: None
    """Computes (K,) float64, the number of samples of each class, for `loss.weights=auto`; None:
    there are no classes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty if the targets have none."""
        return self.target.classes if self.target else ()


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
        max_batches: number of batches in a whole epoch of the rank that has most of them.
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
        self.device, self.num_threads, self.num_ahead = device, num_threads, num_ahead
        self.max_batches, self.in_channels = plan.max_batches, info.in_channels
        self.last_rows = np.zeros(0, [("sample", "i8")])
        self.bad: dict[int, str] = {}

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches that are left of the epoch; of a whole one, if none is left, and in
        evaluation always."""
        if not self.plan.samples.train or self.batches_done == self.max_batches:
            self.plan.begin(self.epoch)
        done = "replaced" if self.plan.samples.train else "left out"
        for (rows, bad), inputs_and_targets in self._finished_batches():
            for sample in bad.keys() - self.bad.keys():
                log.warning("%s (%s)", bad[sample], done)
            self.bad |= bad
            # Before the batch is yielded: a checkpoint written in the loop's body comes after the
            # step that used it.
            self.plan.advance()
            if len(rows):
                self.last_rows = rows
                yield inputs_and_targets
        self.plan.finish()

    def _finished_batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield rows and bad samples of each batch, and its inputs and targets."""
        batches: Iterator[Batch] = iter(self.batches)
        if self.num_ahead:
            waiting = batches
            ahead = in_threads(lambda _: next(waiting, None), repeat(None), 1, self.num_ahead)
            batches = takewhile(lambda batch: batch is not None, ahead)
        if self.device.type == "cuda":
            return prefetched(batches, self._finish, self.device)
        if self.num_threads == 0:
            return map(self._finish, batches)
        return in_threads(self._finish, batches, self.num_threads, self.num_threads)

    def _finish(self, batch: Batch) -> tuple[Any, Any]:
        if batch.error is not None:
            raise batch.error
        return (batch.rows, batch.bad), self.transform(batch) if len(batch.rows) else None

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
    def steps_done(self) -> int:
        """Number of batches already used in all epochs."""
        return self.epoch * len(self) + self.batches_done

    @property
    def is_finished(self) -> bool:
        """True if all batches of the epoch have been used."""
        return self.batches_done >= len(self)

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
