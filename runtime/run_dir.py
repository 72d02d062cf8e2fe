"""The folder of a run: one run at a time writes to it, and does not mix with an earlier one."""

import logging
import os
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from conf.errors import UserError
from conf.schema import Config
from models.pretrained import newest_first
from runtime.preemption import REQUEUE_MARKER

log = logging.getLogger(__name__)

SUMMARY = "summary.json"
"""File in the folder of a run that has ended."""

LOCK_TIMEOUT_S = 120.0
"""Longer than a file server keeps the locks of a machine that was lost (NFS: 90 s)."""

_locks: dict[Path, FileLock] = {}
"""Locks of this process; they end with it, however it ends."""


def acquire_run_dir(cfg: Config, run_dir: Path) -> None:
    """Lock the folder for this run until the process ends; rank 0 calls it.

    Raises:
        UserError: another run writes to it, or an earlier run's checkpoints or events are there and
            the configuration does not say whether to resume or to remove them.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    # torchrun restarts ranks while those of a lost machine may still end.
    may_restart = cfg.resume is not None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    timeout_s = min(LOCK_TIMEOUT_S, cfg.distributed.timeout_s / 2) if may_restart else 0.0
    lock_run_dir(run_dir, timeout_s)
    checkpoints = run_dir / "checkpoints"
    events = list(run_dir.glob("events.out.tfevents.*"))
    if cfg.resume is None and not cfg.overwrite and (events or newest_first(checkpoints)):
        raise UserError(
            f"output_dir={run_dir} already contains a run; resume=auto continues it, "
            "overwrite=true removes its checkpoints and events, or choose another output_dir"
        )
    if cfg.overwrite:
        for path in newest_first(checkpoints):
            shutil.rmtree(path)
        for name in (SUMMARY, REQUEUE_MARKER, "checkpoints/model.safetensors"):
            (run_dir / name).unlink(missing_ok=True)
    if not newest_first(checkpoints):
        # The log of a run that never saved would be mixed with that of its second start.
        for path in [*events, *run_dir.glob("*_id")]:  # of the run in logging services
            path.unlink()


def lock_run_dir(run_dir: Path, timeout_s: float = 0.0) -> None:
    """Lock a folder until the process ends, after waiting for `timeout_s` at most.

    Raises:
        UserError: a run writes to it.
    """
    path = (run_dir / ".lock").resolve()
    if path in _locks:
        return
    lock = FileLock(path, timeout=timeout_s)
    try:
        lock.acquire(poll_interval=1)
    except Timeout as error:
        raise UserError(
            f"output_dir={run_dir} belongs to a run that is still going; wait for its end, "
            "or choose another output_dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        log.warning("%s cannot be locked (%s): start no second run there", run_dir, error)
    _locks[path] = lock
