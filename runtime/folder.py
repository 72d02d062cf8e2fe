"""The run's one folder: one run at a time writes to it, and no earlier one is mixed with it."""

import fcntl
import logging
import os
import platform
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from runtime.checkpoint import newest_first

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

REQUEUE_MARKER = "requeue"
"""File in the run's folder while the run wants to be started again."""

SUMMARY = "summary.json"
"""File in the run's folder from the end of the run on, until it goes on."""

SECONDS_FOR_A_LOST_MACHINE = 120.0
"""Longer than a file server keeps what a machine has locked that it no longer hears of (NFS: 90 s)."""

_locks: dict[Path, IO[str]] = {}
"""Of this process; a lock ends with it, however it ends."""


def claim(cfg: "Config", folder: Path) -> None:
    """Make the folder this run's own, until the process ends; rank 0 calls it.

    Raises:
        ValueError: a run that still lives has it, or an earlier run's checkpoints or events lie there and
            the configuration does not say what to do with them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # torchrun may have started this process because the machine was lost on which the run was.
    is_restarted = (
        cfg.resume is not None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    )
    _lock(
        folder,
        min(SECONDS_FOR_A_LOST_MACHINE, cfg.distributed.timeout_s / 2) if is_restarted else 0,
    )
    checkpoints = folder / "checkpoints"
    events = list(folder.glob("events.out.tfevents.*"))
    if cfg.resume is None and not cfg.overwrite and (events or newest_first(checkpoints)):
        raise ValueError(
            f"output_dir={folder} holds a run already; resume=auto goes on with it, overwrite=true "
            "removes its checkpoints and events first, or choose another output_dir"
        )
    rest = [folder / SUMMARY, folder / REQUEUE_MARKER, *checkpoints.glob("*")]
    if cfg.overwrite or not newest_first(checkpoints):
        # Of a run that never saved, the events would be mixed with those of its second start.
        for path in events + (rest if cfg.overwrite else []):
            path.unlink(missing_ok=True)


def _lock(folder: Path, patience_s: float) -> None:
    """A POSIX lock, which also holds between machines that share a disk, and not in forked processes."""
    path = (folder / ".lock").resolve()
    if path in _locks:
        return
    file = path.open("a+")
    try:
        if not _can_lock(file):
            file.seek(0)
            who = file.read().strip() or "another process"
            end = time.monotonic() + patience_s
            if patience_s:
                log.warning(
                    "waits up to %.0f s for the end of %s, which has %s", patience_s, who, folder
                )
            while not _can_lock(file):
                if time.monotonic() >= end:
                    raise ValueError(
                        f"output_dir={folder} belongs to a run that is still going ({who}); wait for its "
                        "end, or choose another output_dir"
                    )
                time.sleep(1)
    except OSError as error:
        log.warning("%s cannot be locked (%s): start no second run there", folder, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    _locks[path] = file


def _can_lock(file: IO[str]) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
