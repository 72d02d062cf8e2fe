"""The run's one folder: one run at a time writes to it, and no earlier one is mixed with it."""

import fcntl
import logging
import os
import platform
from pathlib import Path
from typing import IO, TYPE_CHECKING

from runtime.checkpoint import newest_first

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

REQUEUE_MARKER = "requeue"
"""File in the run's folder while the run wants to be started again."""

_locks: dict[Path, IO[str]] = {}
"""Of this process; a lock ends with it, however it ends."""


def claim(cfg: "Config", folder: Path) -> None:
    """Make the folder this run's own, until the process ends; rank 0 calls it.

    Raises:
        ValueError: a run that still lives has it, or an earlier run's checkpoints or events lie there and
            the configuration does not say what to do with them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder)
    checkpoints = folder / "checkpoints"
    events = list(folder.glob("events.out.tfevents.*"))
    if cfg.resume is None and not cfg.overwrite and (events or newest_first(checkpoints)):
        raise ValueError(
            f"output_dir={folder} holds a run already; resume=auto goes on with it, overwrite=true "
            "removes its checkpoints and events first, or choose another output_dir"
        )
    rest = [folder / "summary.json", folder / REQUEUE_MARKER, *checkpoints.glob("*")]
    if cfg.overwrite or not newest_first(checkpoints):
        # Of a run that never saved, the events would be mixed with those of its second start.
        for path in events + (rest if cfg.overwrite else []):
            path.unlink(missing_ok=True)


def _lock(folder: Path) -> None:
    """A POSIX lock, which also holds between machines that share a disk, and not in forked processes."""
    path = (folder / ".lock").resolve()
    if path in _locks:
        return
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        who = file.read().strip() or "another process"
        raise ValueError(
            f"output_dir={folder} belongs to a run that is still going ({who}); wait for its end, or "
            "choose another output_dir"
        ) from error
    except OSError as error:
        log.warning("%s cannot be locked (%s): start no second run there", folder, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    _locks[path] = file
