"""The process group of a run that torchrun started."""

import atexit
import ctypes
import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

# The default arguments of its functions are the process group that exists when it is first imported,
# which DDP does: gloo's threads would then outlive the group, into the end of Python.
import torch.distributed.nn.functional
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from torch import nn

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
HEARTBEAT_S = 2.0
LONGEST_CALL_S = 10.0

_board: dist.Store | None = None
"""Where the ranks tell each other where they stand."""

_reporter: threading.Thread | None = None
"""The thread that puts this rank's place on the board."""

_stops_telling = threading.Event()


def local_rank() -> int:
    """Number of this process on its machine, from torchrun.

    Raises:
        RuntimeError: the script was not started by torchrun.
    """
    if "LOCAL_RANK" not in os.environ:
        raise RuntimeError(
            "LOCAL_RANK is not set: start this script with torchrun, for example "
            "torchrun --standalone --nproc_per_node=2 train_ddp.py"
        )
    return int(os.environ["LOCAL_RANK"])


def init_process_group(cfg: "Config", device: torch.device) -> tuple[int, int]:
    """Join the process group that torchrun prepared; left again on every way out of the process.

    Returns:
        Global rank of this process and world size.

    Raises:
        ValueError: `distributed.backend` is unknown or does not fit the device, or Hydra's multirun
            was asked for.
    """
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError(
            "Hydra's multirun (-m) does not work under torchrun: the ranks of all jobs would share one "
            "process group; start torchrun once for each job, for example in a shell loop"
        )
    backend = cfg.distributed.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend not in ("nccl", "gloo") or (backend == "nccl" and device.type != "cuda"):
        raise ValueError(
            f"distributed.backend={backend} does not work with device={device}; use gloo, "
            "or nccl on CUDA"
        )
    global _board, _reporter
    leave_with_the_launcher()
    faulthandler.enable()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, timeout = _store(), timedelta(seconds=cfg.distributed.timeout_s)
    dist.init_process_group(
        # With NCCL, gloo carries the small messages that lie on the host.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    atexit.register(leave_process_group)
    _board = store
    _stops_telling.clear()
    _reporter = threading.Thread(target=_tell_where_we_stand, args=(rank,), daemon=True)
    _reporter.start()
    return rank, world_size


def _store() -> dist.Store:
    """The key-value store of torchrun; a part of its own for each restart.

    A restarted rank would otherwise read the addresses of processes that are gone. On several nodes,
    where agents may count restarts differently, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each
    attempt another store, and rank 0 has to open it.
    """
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not is_shared and os.environ["RANK"] == "0",
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_shared else "0"
    return dist.PrefixStore(f"attempt{attempt}", store)


def leave_process_group() -> None:
    """Destroy the process group if there is one."""
    _stops_telling.set()
    if _reporter is not None:
        # Python aborts if it ends while a thread is about to return from the store.
        _reporter.join(LONGEST_CALL_S)
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_with_the_launcher() -> None:
    """Ask Linux for SIGTERM when torchrun dies; otherwise its ranks would train on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def report_by_rank(main: Callable[["Config"], None]) -> Callable[["Config"], None]:
    """Let an error in `main` be told once, with its rank, and end the process at once.

    A rank whose partner failed says so in one line. When a collective timed out, each rank says where
    it and the others stood, as far as they have told.
    """

    @functools.wraps(main)
    def reporting(cfg: "Config") -> None:
        try:
            main(cfg)
        except Exception as error:
            rank = os.environ.get("RANK", "0")
            text = str(error).lower()
            _stops_telling.set()
            _tell(f"failed{rank}")
            if "timed out" in text or "timeout" in text:
                print(f"[rank {rank}] {_who_is_missing()}", file=sys.stderr)
            if _is_about_a_partner(error):
                reason = str(error).splitlines()[0][:200]
                print(f"[rank {rank}] stops, because another rank has: {reason}", file=sys.stderr)
            else:
                lines = traceback.format_exc().splitlines()
                print("\n".join(f"[rank {rank}] {line}" for line in lines), file=sys.stderr)
            sys.stderr.flush()
            # Without the usual way out, which would wait for the other ranks.
            os._exit(1)

    return reporting


def _is_about_a_partner(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    words = (
        "connection closed by peer",
        "connection reset by peer",
        "timed out waiting",
        "gloo/transport",
    )
    return any(word in str(error).lower() for word in words)


def _tell_where_we_stand(rank: int) -> None:
    """Put the line that this process is at into the store again and again."""
    main_thread = threading.main_thread().ident
    while not _stops_telling.is_set():
        frame = sys._current_frames().get(main_thread or 0)
        stack = traceback.extract_stack(frame)
        ours = [line for line in stack if "site-packages" not in line.filename] or stack
        place = f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno} ({ours[-1].line})"
        if not _tell(f"place{rank}", f"{time.time()} {place}"):
            return
        _stops_telling.wait(HEARTBEAT_S)


def _tell(key: str, value: str = "") -> bool:
    """Whether it could be told; otherwise the group is gone, and nobody will ask."""
    try:
        if _board is not None:
            _board.set(key, value)
    except (RuntimeError, ValueError):
        return False
    return True


def _who_is_missing() -> str:
    """Where each rank stood when it told last, and which of them did not notice that others waited."""
    if _board is None:
        return "the process group could not be joined in time"
    lines, missing = [], []
    try:
        time.sleep(HEARTBEAT_S)  # the others that waited notice at about the same time
        for other in range(dist.get_world_size()):
            if not _board.check([f"failed{other}"]):
                missing.append(other)
            place = "has told nothing"
            if _board.check([f"place{other}"]):
                when, _, place = _board.get(f"place{other}").decode().partition(" ")
                place = f"{max(0.0, time.time() - float(when)):.0f} s ago at {place}"
            lines.append(f"  rank {other}: {place}")
    except (RuntimeError, ValueError):
        lines.append("  the store that would tell more is gone")
    who = ", ".join(str(other) for other in missing) or "unknown"
    return "\n".join(
        [f"a collective timed out; missing: rank {who}. Where each rank stood:", *lines]
    )


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with SyncBatchNorm on CUDA; on the CPU, where it does not exist, BatchNorm stays."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        log.info(
            "SyncBatchNorm needs CUDA: on the CPU each rank keeps BatchNorm statistics of its own"
        )
    return model


def visible_gpus(cfg: "Config", device: torch.device) -> list[int]:
    """Numbers of the GPUs that DataParallel uses; with fewer than two, says that nothing is gained.

    Raises:
        ValueError: the run is on the CPU though GPUs are visible, which DataParallel would take, or the
            model is compiled.
    """
    if cfg.model.compile:
        raise ValueError(
            "model.compile=true does not work with DataParallel, whose copies of the model would all "
            "compute with the weights of the first; use train_ddp.py"
        )
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus and device.type != "cuda":
        raise ValueError(
            f"device={device}: DataParallel takes every visible GPU; hide the {num_gpus} GPUs with "
            "CUDA_VISIBLE_DEVICES= (empty), or use train.py"
        )
    if num_gpus < 2:
        log.info(
            "DataParallel with %d GPUs: it runs, but nothing is gained over train.py", num_gpus
        )
    return list(range(num_gpus))
