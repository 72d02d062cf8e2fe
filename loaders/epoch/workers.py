"""Worker processes of a DataLoader, which ignore signals meant for the training process."""

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader

from loaders.common import tensors_of

FORWARDED_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
"""Signals that are often sent to all processes, and that only the training process handles."""


def worker_loader(
    dataset: Any, sampler: Any, num_workers: int, ahead: int, pin_memory: bool = False
) -> DataLoader:
    """Return a DataLoader whose `num_workers` processes load what the sampler yields.

    The dataset's `__getitems__` makes an item of it, such as a batch of rows. Each process loads
    `ahead` items before they are needed.
    """
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_in_shared_memory,
        num_workers=num_workers,
        prefetch_factor=ahead,
        persistent_workers=True,
        pin_memory=pin_memory,
        worker_init_fn=_init_worker,
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
    """Return a context whose processes are forked from a process without threads.

    A fork of the training process could find locks held by threads that it does not have (of gloo,
    DALI or TensorBoard). The fork server starts here, and imports `module` in the background, as
    well as the script, which each worker would import otherwise.
    """
    import __main__  # the script that runs now

    context = multiprocessing.get_context("forkserver")
    # By its name, because Python before 3.12.8 does not import `__main__` there.
    script = Path(getattr(__main__, "__file__", None) or "__main__").stem
    context.set_forkserver_preload([script, module])
    resource_tracker.ensure_running()  # it would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # the server inherits it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _init_worker(worker_id: int) -> None:
    """Block signals; the worker ends with the training process, or at a SIGTERM from it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    if hasattr(signal, "sigtimedwait"):
        Thread(target=_end_with_training, daemon=True).start()
    else:  # macOS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_with_training() -> None:
    training = multiprocessing.parent_process()
    assert training is not None
    while training.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], 1.0)
        if received and received.si_pid == training.pid:
            break
    os._exit(0)
