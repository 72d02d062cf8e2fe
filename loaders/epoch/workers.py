"""Worker processes of the DataLoader, which ignore signals meant for the training process."""

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from threading import Thread

FORWARDED_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
"""Signals that are often sent to all processes, and that only the training process handles."""


def worker_context(module: str) -> ForkServerContext:
    """Return a context whose processes are forked from a process without threads.

    A fork of the training process could find locks held by threads that it does not have (of gloo,
    DALI or TensorBoard). The fork server starts here, and imports `module` in the background.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", module])
    resource_tracker.ensure_running()  # it would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # the server inherits it
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def init_worker(worker_id: int) -> None:
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
