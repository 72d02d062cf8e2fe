"""Start and end of a run of several processes: torchrun, process group, and name of the run."""

import atexit
import faulthandler
import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from conf import schema
from conf.cli import EXIT_CODE
from conf.credentials import MaskingFormatter, masked
from conf.errors import UserError
from conf.schema import Config
from runtime.distributed.group import ProcessGroup
from runtime.distributed.heartbeat import Heartbeat

WAIT_S = 5.0

OUTSIDE = "198.51.100.1"
"""Address that no machine has, to which the default route leads."""

NCCL_EXTRA_S = 30.0
"""Seconds that NCCL, which ends a process without naming a rank, waits longer than `Heartbeat`."""

_heartbeat: Heartbeat | None = None  # of this process, in its process group


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
    global _heartbeat
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(
            "Hydra's multirun (-m) does not work under torchrun: the ranks of all jobs would share "
            "one process group; start torchrun once for each job, for example in a shell loop"
        )
    backend = cfg.distributed.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    elif backend == "nccl" and device.type != "cuda":
        raise UserError(f"distributed.backend=nccl does not work with device={device}; use gloo")
    faulthandler.enable()
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun's store has the addresses of earlier attempts, too. The one of rank 0, which
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 asks for where nodes count attempts differently, is new.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    # NCCL writes its record of the last collectives there before it ends a process.
    record = f"{Path(cfg.output_dir).absolute()}/flight_record_rank_"
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", record)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives in it
    has_others = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size  # machines
    if has_others and (name := interface_to(os.environ["MASTER_ADDR"]) or interface_to(OUTSIDE)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    timeout_s = cfg.distributed.timeout_s
    extra_s = NCCL_EXTRA_S if backend == "nccl" else 0.0
    dist.init_process_group(
        # With NCCL, gloo carries the small messages that lie on the host.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s + extra_s),
        device_id=device if backend == "nccl" else None,
    )
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        dist.set_debug_level(dist.DebugLevel.INFO)  # DDP names parameters without gradients
    atexit.register(leave_process_group)
    _heartbeat = Heartbeat(store, rank, world_size, device, timeout_s)
    if rank != 0:
        console = logging.StreamHandler(sys.stderr)
        console.setFormatter(MaskingFormatter(f"[rank {rank}] %(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[console], force=True)
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
    found = psutil.net_if_addrs().items()
    names = [name for name, addresses in found if any(x.address == ours for x in addresses)]
    return "" if ours.startswith("127.") else "".join(names[:1])


def leave_process_group() -> None:
    """Destroy the process group if there is one."""
    if _heartbeat is not None:
        _heartbeat.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def end_rank(error: Exception, message: str | None) -> NoReturn:
    """End this process because of an error, at once: the usual way would wait for other ranks.

    Args:
        error: error that ends the process.
        message: message for the user, if the user can fix the error. Rank 0 prints it, and then
            torchrun ends the others; each first waits for that. torchrun's summary, which ends its
            output, has it as well. None: it is a bug, which each rank prints, in one line if its
            partner has failed.
    """
    if message is not None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Not by the signal: the summary has seven lines on each rank that fails.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            # The first rank of another machine prints it, too, before the others there.
            time.sleep(WAIT_S * sum(os.environ[key] != "0" for key in ("RANK", "LOCAL_RANK")))
        print(message, file=sys.stderr, flush=True)
        with suppress(OSError):  # a full disk
            record_message(message)
        os._exit(EXIT_CODE)
    reason = str(error)
    is_of_partner = "gloo/transport" in reason or isinstance(error, DistError)
    is_timeout = is_of_partner and re.search("timed out|timeout", reason, re.IGNORECASE)
    if _heartbeat is not None and is_timeout:
        if _heartbeat.stopped.is_set():  # it has reported
            time.sleep(WAIT_S)  # in which NCCL ends this process once its record is written
        else:
            _heartbeat.report_timeout()
    text = "".join(traceback.format_exception(error))
    if is_of_partner:
        first_line, _, _ = reason.partition("\n")
        text = f"stops, because another rank has: {masked(first_line)[:200]}"
    lines = [f"[rank {os.environ['RANK']}] {line}" for line in masked(text).splitlines()]
    print("\n".join(lines), file=sys.stderr, flush=True)
    os._exit(1)


def record_message(message: str) -> None:
    """Hand torchrun the message of an error for its summary, without a traceback."""
    try:
        raise UserError(message) from None
    except UserError as error:
        get_error_handler().record_exception(error.with_traceback(None))


def run_stamp() -> str:
    """Return the start time of the run, the same string on every rank that torchrun started.

    Ranks start at different moments; the first to ask torchrun's key-value store decides. Without
    that store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), it is what torchrun calls the run (--rdzv_id).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ["TORCHELASTIC_RUN_ID"]
    store, _, _ = next(dist.rendezvous("env://"))
    return store.compare_set("run_stamp", "", schema.run_stamp()).decode()
