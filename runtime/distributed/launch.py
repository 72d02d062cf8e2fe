"""Start and end of a run of several processes: torchrun, process group, and name of the run."""

import atexit
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from torch.distributed import DistError

from conf import schema
from conf.cli import EXIT_CODE
from conf.credentials import MaskingFormatter, masked
from conf.errors import UserError
from conf.schema import Config
from runtime.distributed import heartbeat
from runtime.distributed.group import ProcessGroup

WAIT_S = 5.0

OUTSIDE = "198.51.100.1"
"""Address that no machine has, to which the default route leads."""

PARTNER_ERRORS = (
    *("connection closed by peer", "connection reset by peer"),
    *("timed out waiting", "gloo/transport"),
)
"""Words of errors on a rank whose partner has failed."""


def local_rank() -> int:
    """Return the number of this process on its machine, from torchrun.

    Raises:
        UserError: the script was not started by torchrun.
    """
    names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not os.environ.get(name)]:
        raise UserError(
            f"{missing[0]} is not set: start this script with torchrun, for example "
            f"torchrun --standalone --nproc_per_node=2 {Path(sys.argv[0]).name}"
        )
    return int(os.environ["LOCAL_RANK"])


def init_process_group(cfg: Config, device: torch.device) -> ProcessGroup:
    """Join the process group that torchrun prepared; it is left at every end of the process.

    From here on rank 0 alone logs everything; the other ranks log warnings.

    Raises:
        UserError: `distributed.backend` does not fit the device, or Hydra's multirun was asked for.
    """
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(
            "Hydra's multirun (-m) does not work under torchrun: the ranks of all jobs would share "
            "one process group; start torchrun once for each job, for example in a shell loop"
        )
    backend = cfg.distributed.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise UserError(f"distributed.backend=nccl does not work with device={device}; use gloo")
    faulthandler.enable()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, timeout = open_store(), timedelta(seconds=cfg.distributed.timeout_s)
    heartbeat.record_collectives(Path(cfg.output_dir))
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size:  # several machines
        interface = interface_to(os.environ["MASTER_ADDR"]) or interface_to(OUTSIDE)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        # With NCCL, gloo carries the small messages that lie on the host.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        dist.set_debug_level(dist.DebugLevel.INFO)  # DDP names parameters without gradients
    atexit.register(leave_process_group)
    heartbeat.start(store, device, cfg.distributed.timeout_s)
    if rank != 0:
        _only_warn(rank)
    return ProcessGroup()


def interface_to(address: str) -> str:
    """Return the name of the network interface that leads to a machine; empty if that is this
    machine or if it is unknown.

    gloo otherwise takes the address of the machine's own name, which is 127.0.1.1 on Debian: no
    other machine can reach it.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect((address, 9))  # sends nothing
            ours = datagrams.getsockname()[0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == ours for known in addresses) and not ours.startswith("127."):
            return name
    return ""


def _only_warn(rank: int) -> None:
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(MaskingFormatter(f"[rank {rank}] %(message)s"))
    root = logging.getLogger()
    root.handlers = [console]
    root.setLevel(logging.WARNING)


def open_store() -> dist.Store:
    """Open the key-value store of torchrun, with another key prefix after each restart.

    A restarted rank would otherwise read the addresses of processes that are gone. On several
    nodes, where agents may count restarts differently, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives
    each attempt another store, and rank 0 has to open it.
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
    heartbeat.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def end_rank(error: Exception, message: str | None) -> NoReturn:
    """End this process because of an error, at once: the usual way would wait for other ranks.

    Args:
        error: error that ends the process.
        message: message for the user, if the user can fix the error; None: it is a bug. Rank 0
            prints the message, and then torchrun ends the others; each first waits for that.
    """
    if message is None:
        end_failed_rank(error)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The first rank of another machine prints it, too, before the others there.
        time.sleep(WAIT_S * sum(os.environ[key] != "0" for key in ("RANK", "LOCAL_RANK")))
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def end_failed_rank(error: Exception) -> NoReturn:
    """Print an error with its rank, and end this process with 1, without waiting for other ranks.

    A rank whose partner failed prints that in one line.
    """
    rank = os.environ["RANK"]
    text = str(error).lower()
    heartbeat.announce(error)
    if isinstance(error, DistError) or any(words in text for words in PARTNER_ERRORS):
        reason = masked(str(error).partition("\n")[0])[:200]
        print(f"[rank {rank}] stops, because another rank has: {reason}", file=sys.stderr)
    else:
        lines = masked("".join(traceback.format_exception(error))).splitlines()
        print("\n".join(f"[rank {rank}] {line}" for line in lines), file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def run_stamp() -> str:
    """Return the start time of the run, the same string on every rank that torchrun started.

    Ranks start at different moments; the first to ask torchrun's key-value store decides. Without
    that store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), it is what torchrun calls the run (--rdzv_id).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ["TORCHELASTIC_RUN_ID"]
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=60),
    )
    return store.compare_set("run_stamp", "", schema.run_stamp()).decode()
