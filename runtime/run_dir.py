"""The folder of a run: one run at a time writes to it, and does not mix with an earlier one."""

import logging
import os
import shutil
from logging.handlers import MemoryHandler
from pathlib import Path

from filelock import FileLock, Timeout

from conf.errors import UserError
from conf.schema import Config
from runtime.checkpoint_files import newest_first
from runtime.preemption import REQUEUE_MARKER

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
"""File in the folder of a run that has ended."""

LOCK_TIMEOUT_S = 120.0
"""Longer than a file server keeps the locks of a machine that was lost (NFS: 90 s)."""

_locks: dict[Path, FileLock] = {}
"""Locks of this process; they end with it, however it ends."""


def acquire_run_dir(cfg: Config, run_dir: Path) -> None:
    """Lock the folder for this run until the process ends; rank 0 calls it. A UserError if another
    run writes to it, or was there and is neither to be resumed nor removed."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # torchrun restarts ranks while those of a lost machine may still end.
    may_restart = cfg.resume is not None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    path = (run_dir / ".lock").resolve()
    lock = _locks.setdefault(path, FileLock(path))
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S if may_restart else 0, poll_interval=1)
    except Timeout as error:
        raise UserError(
            f"output_dir={run_dir} belongs to a run that is still going; wait for its end, "
            "or choose another output_dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        log.warning("%s cannot be locked (%s): start no second run there", run_dir, error)
    checkpoints = run_dir / "checkpoints"
    events = list(run_dir.glob("events.out.tfevents.*"))
    if cfg.resume is None and not cfg.overwrite and (events or newest_first(checkpoints)):
        raise UserError(
            f"output_dir={run_dir} already contains a run; resume=auto continues it, "
            "overwrite=true removes its checkpoints and events, or choose another output_dir"
        )
    if cfg.overwrite:
        shutil.rmtree(checkpoints, ignore_errors=True)
        for name in (SUMMARY, REQUEUE_MARKER):
            (run_dir / name).unlink(missing_ok=True)
    if not newest_first(checkpoints):
        # The log of a run that never saved would be mixed with that of its second start.
        for path in [*events, *run_dir.glob("*_id")]:  # of the run in logging services
            path.unlink()
    for handler in logging.getLogger().handlers:
        if isinstance(handler, MemoryHandler):  # train.log, see conf/config.yaml
            handler.capacity = 0
            handler.flush()
