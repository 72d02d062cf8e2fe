"""Worker processes of a DataLoader, which end with the training process and at no signal."""

import multiprocessing
import os
import signal
from functools import cache, partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader

from loaders.common import tensors_of

BLOCKED_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
"""Signals that are often sent to all processes, and that only the training process handles."""


def worker_loader(
    dataset: Any, sampler: Any, num_workers: int, prefetch_factor: int, pin_memory: bool = False
) -> DataLoader:
    """Return a DataLoader whose `num_workers` processes load what the sampler yields.

    The dataset's `__getitems__` makes an item of it, such as a batch of rows. Each process loads
    `prefetch_factor` items before they are needed.
    """
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_in_shared_memory,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        pin_memory=pin_memory,
        worker_init_fn=partial(_end_with_training, _end_of_training()),
        multiprocessing_context=_worker_context(type(dataset).__module__),
        # Drawing from the global generator would change dropout after a resume.
        generator=torch.Generator(),
    )


def _in_shared_memory(batch: Any) -> Any:
    """Move the tensors of a batch to shared memory.

    The DataLoader's queue would do it in a thread, where a full /dev/shm loses the batch and the
    training process waits forever.
    """
    for tensor in tensors_of(batch):
        tensor.share_memory_()
    return batch


def _worker_context(module: str) -> ForkServerContext:
    """Return a context whose processes are forked from a process without threads, since a fork of
    the training process could find locks held by threads that it does not have.

    That process inherits the blocked signals, and its forks do. It imports the script and `module`
    once for all of them; the script by its name, because Python before 3.12.8 ignores `__main__`.
    """
    import __main__  # the script that runs now

    context = multiprocessing.get_context("forkserver")
    script = Path(getattr(__main__, "__file__", None) or "__main__").stem
    context.set_forkserver_preload([script, module])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        resource_tracker.ensure_running()  # its start unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@cache
def _end_of_training() -> Connection:
    """Return a connection from which something can be read once this process ends or is killed."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    util.Finalize(None, writer.close, exitpriority=0)  # before Python waits for the workers
    return reader


def _end_with_training(end: Connection, worker_id: int) -> None:
    def wait() -> None:
        end.poll(None)
        os._exit(0)

    Thread(target=wait, daemon=True).start()
