"""The only file with names that torch and Python keep private; checked with torch 2.15 and Python 3.11."""

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


def flight_record(backend: str) -> bytes:
    """Record that torch keeps of the collectives of this process, pickled; empty if it keeps none."""
    dump = "_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace"
    return getattr(torch._C._distributed_c10d, dump, bytes)()


def main_thread_stack() -> traceback.StackSummary:
    """Stack of the main thread."""
    # Without a variable for the frame, which would keep its tensors alive.
    return traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
