"""Signals after which a run saves and exits: SIGTERM, SIGUSR1 (Slurm's --signal), SIGHUP (a closed
terminal) and Ctrl-C. While it still starts, it exits without saving."""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import NoReturn

log = logging.getLogger(__name__)

REQUEUE_MARKER = "requeue"
"""File in the folder of a run that has to be started again."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Besides SIGINT, which interrupts a run that still starts as it does any Python."""

_requested = Event()
_run_dir: Path | None = None
_has_begun = False
# The parent, as long as it lives: ranks of a torchrun that was killed save and end, too.
_torchrun: int | None = None


def listen() -> None:
    """Handle these signals from now on; SIGHUP that is ignored, as under nohup, stays ignored."""
    global _torchrun
    for number in (*SIGNALS, signal.SIGINT):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _remember)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _torchrun = os.getppid()
    # A thread is told of a signal even while the main one waits in C++, as for another rank.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    Thread(target=_act_at_once, args=(reader,), daemon=True).start()


def start(run_dir: Path) -> None:
    """Exit with 75 at the next signal, or now if there was one, until the run has begun: there is
    nothing to save, and indexing or other ranks may take minutes."""
    global _run_dir, _has_begun
    _run_dir, _has_begun = run_dir, False
    if _requested.is_set():
        _exit_at_once(run_dir)


def begin() -> None:
    """Let the run exit by itself from now on, after the step in which `is_requested()` is True."""
    global _has_begun
    _has_begun = True


def is_requested() -> bool:
    """Return True if the main thread has handled such a signal, or torchrun has ended."""
    return _requested.is_set() or (_torchrun is not None and _torchrun != os.getppid())


def leave(run_dir: Path, step_number: int, rank: int) -> NoReturn:
    """Exit with 75 after a checkpoint of this step: start the run again with `resume=auto`."""
    if rank == 0:
        (run_dir / REQUEUE_MARKER).touch()
        fix = f"continue with output_dir={run_dir} resume=auto"
        log.warning("stopped by a signal: saved at step %d; %s", step_number, fix)
    sys.exit(os.EX_TEMPFAIL)


def _remember(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT and (_requested.is_set() or not _has_begun):
        signal.default_int_handler(number, frame)
    _requested.set()


def _act_at_once(signals: int) -> None:
    """Read the numbers of signals from a pipe, and act on those that must not wait for a step."""
    while numbers := os.read(signals, 1):
        if numbers[0] not in SIGNALS or _run_dir is None:
            continue
        if not _has_begun:
            _exit_at_once(_run_dir)
        with suppress(OSError):  # a step that takes too long, as it compiles, may be killed
            (_run_dir / REQUEUE_MARKER).touch()


def _exit_at_once(run_dir: Path) -> NoReturn:
    with suppress(OSError):
        (run_dir / REQUEUE_MARKER).touch()
        fix = f"start again with output_dir={run_dir} resume=auto"
        # Not by `print`, whose lock the main thread may hold.
        os.write(2, f"stopped by a signal before the first step; {fix}\n".encode())
    os._exit(os.EX_TEMPFAIL)
