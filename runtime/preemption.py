"""Signals after which a run saves and exits: SIGTERM, SIGUSR1 (Slurm's --signal), SIGHUP (a closed
terminal) and Ctrl-C. While it still starts, it exits without saving."""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

log = logging.getLogger(__name__)

REQUEUE_MARKER = "requeue"
"""File in the folder of a run that has to be started again."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

signalled: int | None = None
"""The last such signal; the run exits by itself after the step in which there was one."""

_run_dir: Path | None = None
_has_begun = False


def listen() -> None:
    """Handle these signals from now on; SIGHUP that is ignored, as under nohup, stays ignored."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def start(run_dir: Path) -> None:
    """Exit with 75 at the next signal, or now if there was one, until the run has begun: there is
    nothing to save, and indexing may take minutes."""
    global _run_dir, _has_begun
    _run_dir, _has_begun = run_dir, False
    if signalled is not None:
        _exit_at_once(run_dir)


def begin() -> None:
    """Let the run exit by itself from now on."""
    global _has_begun
    _has_begun = True


def end() -> None:
    """Do not ask for another start from now on: the run has reached its end."""
    global _run_dir
    _run_dir = None


def leave(run_dir: Path, step_number: int, rank: int) -> NoReturn:
    """Exit with 75 after a checkpoint of this step: start the run again with `resume=auto`."""
    if rank == 0:
        (run_dir / REQUEUE_MARKER).touch()
        fix = f"continue with output_dir={run_dir} resume=auto"
        log.warning("stopped by a signal: saved at step %d; %s", step_number, fix)
    sys.exit(os.EX_TEMPFAIL)


def _handle(number: int, frame: FrameType | None) -> None:
    global signalled
    # Ctrl-C interrupts a run that still starts as it does any Python.
    if number == signal.SIGINT and (signalled is not None or not _has_begun):
        signal.default_int_handler(number, frame)
    signalled = number
    if _run_dir is None or number == signal.SIGINT:
        return
    if not _has_begun:
        _exit_at_once(_run_dir)
    _mark(_run_dir)  # a step that takes too long, as it compiles, may be killed


def _mark(run_dir: Path) -> bool:
    """Ask for another start, and return True; but not after torchrun's SIGTERM, which ends ranks
    that are left when another one has failed. After that of the user, all save and `leave()`."""
    if signalled == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    with suppress(OSError):
        (run_dir / REQUEUE_MARKER).touch()
    return True


def _exit_at_once(run_dir: Path) -> NoReturn:
    if _mark(run_dir):
        fix = f"start again with output_dir={run_dir} resume=auto"
        # Not by `print`, in whose middle the signal may have come.
        os.write(2, f"stopped by a signal before the first step; {fix}\n".encode())
    os._exit(os.EX_TEMPFAIL)
