"""Signals that ask the run to save and leave: SIGTERM, SIGUSR1 (SLURM's --signal) and Ctrl-C."""

import signal
import threading
from types import FrameType

EXIT_CODE = 75
"""The run was asked to leave and has saved; start it again with `resume=auto` (EX_TEMPFAIL)."""

_requested = threading.Event()


def is_requested() -> bool:
    """Whether such a signal has arrived in this process."""
    return _requested.is_set()


def listen() -> None:
    """From now on only remember the signals; a second Ctrl-C stops at once."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, _remember)


def _remember(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT and _requested.is_set():
        signal.default_int_handler(number, frame)
    _requested.set()
