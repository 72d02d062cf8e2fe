"""Finish the next batch while the current one is used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any

import torch

from loaders.pixels import RawBatch
from loaders.threads import torch_threads

Finished = tuple[Any, tuple[torch.Tensor, torch.Tensor]]
"""Rows, and their inputs and targets on the device."""

Finish = Callable[..., Finished]
"""`Pixels.finish`."""


def in_thread(batches: Iterable[RawBatch], finish: Finish, num_threads: int) -> Iterator[Finished]:
    """On the CPU: one thread finishes, with so many threads of torch."""
    with torch_threads(1, "finish", num_threads) as pool:
        ready: Future[Finished] | None = None
        for batch in batches:
            following = pool.submit(finish, *batch)
            if ready is not None:
                yield ready.result()
            ready = following
        if ready is not None:
            yield ready.result()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the whole run: memory that was allocated on a stream is used again on that stream only."""
    return torch.cuda.Stream(device)


def on_stream(
    batches: Iterable[RawBatch], finish: Finish, device: torch.device
) -> Iterator[Finished]:
    """On CUDA: a stream beside that of the training copies and finishes.

    The backend's own work on the device, such as DALI's, is put on that stream, too: nothing of a batch waits
    for the training. The host is at most two batches ahead of the training stream, so that memory does
    not pile up where a step takes longer than a batch.
    """
    stream, waiting = side_stream(device), iter(batches)
    ready: tuple[Finished, torch.cuda.Event, RawBatch] | None = None
    # Of each batch handed out: when the training is done with it, and what it was made of until then.
    in_use: deque[tuple[torch.cuda.Event, RawBatch]] = deque()
    while True:
        if len(in_use) == 2:
            in_use.popleft()[0].synchronize()
        with torch.cuda.stream(stream):
            batch = next(waiting, None)
            following = batch and (finish(*batch), stream.record_event(), batch)
        if ready is not None:
            yield _handed_over(*ready[:2])
            in_use.append((torch.cuda.current_stream(device).record_event(), ready[2]))
        if following is None:
            break
        ready = following
    stream.record_event().synchronize()  # before what the last ones were made of is let go


def _handed_over(finished: Finished, is_finished: torch.cuda.Event) -> Finished:
    """The batch for the training stream."""
    training = torch.cuda.current_stream()
    training.wait_event(is_finished)
    for tensor in finished[1]:
        # Its memory must not be used again before the training stream is done with it.
        tensor.record_stream(training)
    return finished
