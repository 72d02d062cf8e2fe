"""Signals after which a run saves and exits: SIGTERM, SIGUSR1 (Slurm's --signal) and Ctrl-C."""

import signal
import socket
import threading
from contextlib import suppress
from types import FrameType

EXIT_CODE = 75
"""Exit code (EX_TEMPFAIL) of a run that saved after a signal and can go on with `resume=auto`."""

REQUEUE_MARKER = "requeue"
"""File in the folder of a run that has to be started again."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_requested = threading.Event()
_arrived: set[int] = set()
_numbers: socket.socket | None = None
"""Receives the number of each signal at once, even while the main thread runs no Python."""


def is_requested() -> bool:
    """Return True if the main thread has handled such a signal."""
    return _requested.is_set()


def has_arrived() -> bool:
    """Return True if such a signal has arrived, even if a waiting main thread has not handled it.

    For one thread besides the main thread.
    """
    if _numbers is not None:
        with suppress(BlockingIOError):
            _arrived.update(_numbers.recv(4096))
    return not _arrived.isdisjoint(SIGNALS)


def listen() -> None:
    """Record these signals instead of ending; a second Ctrl-C raises KeyboardInterrupt."""
    global _numbers
    for number in SIGNALS:
        signal.signal(number, _remember)
    if _numbers is None:
        _numbers, sender = socket.socketpair()
        _numbers.setblocking(False)
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)


def _remember(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT and _requested.is_set():
        signal.default_int_handler(number, frame)
    _requested.set()
