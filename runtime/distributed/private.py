"""The only file with names that torch and Python keep private; checked with torch 2.15 and Python 3.11."""

import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist


def set_nccl_timeout(device: torch.device, timeout: timedelta) -> None:
    """Change how long NCCL's own watchdog waits for a collective of the default group."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    backend._set_default_timeout(timeout)


def flight_recorder(device: torch.device) -> Callable[[], bytes]:
    """Function that returns torch's record of the collectives of this process on a device, pickled, or nothing.

    `nccl` is the name of ProcessGroupNCCL, which has a recorder of its own. With torch 2.15 the same backend is
    ProcessGroupNCCL2, which is called `nccl2` and recorded as any other one.
    """
    name = dist.distributed_c10d._get_default_group()._get_backend(device).name()
    module = torch._C._distributed_c10d
    if name == "nccl":
        return module._dump_nccl_trace
    dump = getattr(module, "_dump_fr_trace", bytes)
    return dump if name == "gloo" else partial(dump, backend=name)


def main_thread_stack() -> traceback.StackSummary:
    """Stack of the main thread."""
    # Without a variable for the frame, which would keep its tensors alive.
    return traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
