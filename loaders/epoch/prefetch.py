"""Copy and transform the next batch while the current one is used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch

from loaders.common import tensors_of, torch_threads

Loaded = tuple[Any, Any]
"""Rows, and what was loaded of them or, transformed, their inputs and targets on the device."""

Transform = Callable[[Any, Any], Loaded]


def transformed(
    batches: Iterable[Loaded], transform: Transform, num_threads: int
) -> Iterator[Loaded]:
    """Transform batches on the CPU, in one thread that uses `num_threads` threads of torch."""
    pool = torch_threads(1, "transform", num_threads)
    try:
        ready: Future[Loaded] | None = None
        for batch in batches:
            following = pool.submit(transform, *batch)
            if ready is not None:
                yield ready.result()
            ready = following
        if ready is not None:
            yield ready.result()
    finally:
        # Without waiting: the garbage collector may end this generator in the pool's own thread.
        pool.shutdown(wait=False, cancel_futures=True)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
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
    stream, waiting = side_stream(device), iter(batches)
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
            in_use.append((blocking_event(torch.cuda.current_stream(device)), source))
        if following is None:
            break
        ready = following
    blocking_event(stream).synchronize()  # before the last sources are freed


def blocking_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event for which the host sleeps: busy waiting would take a CPU from the loader."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
