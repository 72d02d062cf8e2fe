"""Signals after which a run saves and exits: SIGTERM, SIGUSR1 (Slurm's --signal) and Ctrl-C."""

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

log = logging.getLogger(__name__)

REQUEUE_MARKER = "requeue"
"""File in the folder of a run that has to be started again."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_requested = threading.Event()
# The parent, as long as it lives: ranks of a torchrun that was killed save and end, too.
_torchruns: list[int] = []


def is_requested() -> bool:
    """Return True if the main thread has handled such a signal, or torchrun has ended."""
    if _torchruns and _torchruns[-1] != os.getppid():
        _requested.set()
    return _requested.is_set()


def listen() -> None:
    """Record these signals instead of ending; a second Ctrl-C raises KeyboardInterrupt."""
    for number in SIGNALS:
        signal.signal(number, _remember)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _torchruns.append(os.getppid())


def leave(run_dir: Path, step_number: int, rank: int) -> NoReturn:
    """Exit with 75 after a checkpoint of this step: start the run again with `resume=auto`."""
    if rank == 0:
        (run_dir / REQUEUE_MARKER).touch()
        fix = f"continue with output_dir={run_dir} resume=auto"
        log.warning("stopped by a signal: saved at step %d; %s", step_number, fix)
    sys.exit(os.EX_TEMPFAIL)


def _remember(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT and _requested.is_set():
        signal.default_int_handler(number, frame)
    _requested.set()
