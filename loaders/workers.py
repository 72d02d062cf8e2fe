"""Worker processes of the DataLoader, forked from a clean process: it has imported what they need, nothing else.

A fork of the training process would find locked for ever what its other threads (gloo's, DALI's, TensorBoard's)
held at that moment.
"""

import functools
import multiprocessing
import os
import signal
import sys
from collections import deque
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import is_exiting
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import ModuleType
from typing import Any, cast

from loaders.limits import limits_explained

OF_THE_TRAINING = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
"""Signals that are often sent to all processes, and which the training process alone acts on."""

_died: deque[Any] = deque()
"""Worker processes that ended although nobody had told them to."""


@functools.cache
def _clean_process(pid: int) -> forkserver.ForkServer:
    """That of the process `pid`, not yet started; another one than Python's own, which others may use."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["loaders.execute", "loaders.workers"])
    return server


class WorkerProcess(ForkServerProcess):
    """One that does not import the script that is running, and with it all that this imports."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main, connect = sys.modules["__main__"], forkserver.connect_to_new_process
        sys.modules["__main__"] = ModuleType("__main__")
        forkserver.connect_to_new_process = _clean_process(os.getpid()).connect_to_new_process
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"], forkserver.connect_to_new_process = main, connect


class WorkerContext(ForkServerContext):
    Process = WorkerProcess


def begin_to_start() -> WorkerContext:
    """Start the process that workers are forked from, without waiting for the seconds that its imports take."""
    resource_tracker.ensure_running()  # which would unblock signals
    # Blocked from its first moment on; Python has no other way to tell it where the modules are.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_TRAINING)
    before = os.environ.get("PYTHONPATH")
    try:
        places = [str(Path(__file__).parents[1]), *filter(None, [before])]
        os.environ["PYTHONPATH"] = os.pathsep.join(places)
        _clean_process(os.getpid()).ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return WorkerContext()


def init_worker(worker_id: int) -> None:
    """Leave it to the training process to act on signals that are sent to all its processes."""
    if not hasattr(signal, "sigtimedwait"):  # macOS
        return
    # Blocked in this thread, and so in those that it will start.
    signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_TRAINING)
    Thread(target=_end_with_training, args=(os.getppid(),), daemon=True).start()


def _end_with_training(parent: int) -> None:
    """End this worker when the training process is gone or ends it, which it does with SIGTERM."""
    training = multiprocessing.parent_process()  # not the parent, which is the clean process
    assert training is not None
    while os.getppid() == parent and training.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], 1.0)
        if received and received.si_pid == training.pid:
            break
    os._exit(0)


def watch(workers: list[Any], told_to_end: Any) -> None:
    """Raise an error in the main thread, wherever it is, as soon as a worker dies.

    Args:
        workers: the processes, which are no children of this one: no signal tells of their deaths.
        told_to_end: an event that is set before they are.
    """
    if current_thread() is not main_thread():
        return  # then the DataLoader notices, after five seconds
    _handle_deaths()
    # Descriptors of its own: those of a process that has ended may be another file's by then.
    sentinels = {os.dup(worker.sentinel): worker for worker in workers}
    Thread(target=_wait_for_deaths, args=(sentinels, told_to_end), daemon=True).start()


def _wait_for_deaths(sentinels: dict[int, Any], told_to_end: Any) -> None:
    while sentinels:
        for ended in cast(list[int], wait(list(sentinels))):
            worker = sentinels.pop(ended)
            os.close(ended)
            # At its end a process ends its workers itself, and reads their exit codes, which can be read once.
            if not (told_to_end.is_set() or is_exiting()):
                _died.append(worker)
                # So that it ends what the main thread waits for, too.
                signal.pthread_kill(cast(int, main_thread().ident), signal.SIGCHLD)


@functools.cache
def _handle_deaths() -> None:
    before: Any = signal.getsignal(signal.SIGCHLD)

    def handle(*arguments: Any) -> None:
        while _died:
            worker = _died.popleft()
            code = worker.exitcode
            if code:
                how = (
                    f"killed by signal: {signal.strsignal(-code)}"
                    if code < 0
                    else f"gone, exit code {code}"
                )
                with limits_explained():
                    raise RuntimeError(f"DataLoader worker (pid {worker.pid}) is {how}")
        if callable(before):
            before(*arguments)

    signal.signal(signal.SIGCHLD, handle)
