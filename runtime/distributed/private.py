"""The only file with private names of torch and Python; checked with torch 2.15 and Python 3.11."""
# ruff: noqa: SLF001

import sys
import threading
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist


def set_nccl_timeout(device: torch.device, timeout: timedelta) -> None:
    """Change how long NCCL's own watchdog waits for a collective of the default group."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    backend._set_default_timeout(timeout)


def backend_name(device: torch.device) -> str:
    """Return the name of the class that carries out the collectives of a device: `gloo`, `nccl` or,
    from torch 2.15, `nccl2`."""
    return dist.distributed_c10d._get_default_group()._get_backend(device).name()


def flight_record(device: torch.device) -> bytes:
    """Return torch's record of the collectives of this process on a device, pickled, or nothing.

    ProcessGroupNCCL (`nccl`) has its own recorder, ProcessGroupNCCL2 (`nccl2`) the general one.
    """
    name, module = backend_name(device), vars(torch._C._distributed_c10d)
    if name == "nccl":
        return module["_dump_nccl_trace"]()
    dump = module.get("_dump_fr_trace", bytes)
    return dump() if name == "gloo" else dump(backend=name)


def main_thread_stack() -> traceback.StackSummary:
    """Return the stack of the main thread."""
    # Without a variable for the frame, which would keep its tensors alive.
    return traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
