"""The processes of a run, one or many: their exchange of small values, their name and their end."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from textwrap import indent
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from conf import schema
from conf.cli import EXIT_CODE
from conf.errors import told

T = TypeVar("T")


class ProcessGroup:
    """Ranks of a run, which exchange small values by gloo; a process alone exchanges nothing. Every
    rank calls its methods."""

    def __init__(self, handle: Any = None) -> None:
        """Use torch's process group `handle` of all ranks; None: this process is alone."""
        self.handle = handle
        self.rank, self.world_size = 0, 1
        if handle is not None:
            self.rank, self.world_size = dist.get_rank(handle), dist.get_world_size(handle)
        self.pending: Any = None  # request, and the work that exchanges it
        self.torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def is_orphan(self) -> bool:
        """Return True if torchrun has ended: ranks of one that was killed have to end, too."""
        return self.torchrun is not None and self.torchrun != os.getppid()

    def duplicate(self, timeout_s: float) -> "ProcessGroup":
        """Return the same ranks, with messages that do not mix with those of this group."""
        if self.world_size == 1:
            return self
        return ProcessGroup(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    def agree(self, request: int) -> int:
        """Return the greatest request of any rank. With several ranks, it is that of the previous
        call, and at first 0: a rank waits for the others' previous step, not for this one."""
        if self.world_size == 1:
            return request
        answer = self.pending_request()
        shared = torch.tensor(request, dtype=torch.int32)
        work = dist.all_reduce(shared, dist.ReduceOp.MAX, self.handle, async_op=True)
        self.pending = shared, work
        return answer

    def pending_request(self) -> int:
        """Return what the last `agree()` has found; 0 if it was returned before."""
        if self.pending is None:
            return 0
        (shared, work), self.pending = self.pending, None
        work.wait()
        return int(shared)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, self.handle)
        return values

    def broadcast_from_rank0(self, read: Callable[[], T]) -> T:
        """Return rank 0's result of `read`, or raise its error, on all ranks; CPU tensors only."""
        if self.world_size == 1:
            return read()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = read()
            except Exception as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0, group=self.handle)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks, which changes the tensor itself."""
        if self.world_size == 1:
            return tensor
        dist.all_reduce(tensor, group=self.handle)
        return tensor / self.world_size

    def full_tensor(self, tensor: Any) -> Tensor:
        """Return the full tensor of one that is sharded over the ranks."""
        return tensor.full_tensor() if is_sharded(tensor) else tensor


def is_sharded(value: Any) -> bool:
    """Return True for a tensor of which each rank has a shard, without an import of PyTorch's class
    for them, which takes seconds."""
    return hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient; of one that is sharded, this rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def run_stamp() -> str:
    """Return the start time of the run, the same text on all ranks: that of the first to ask
    torchrun's key-value store. Without that store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), it is what
    torchrun calls the run (--rdzv_id)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return schema.run_stamp()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return os.environ["TORCHELASTIC_RUN_ID"]
    store, _, _ = next(dist.rendezvous("env://"))
    return store.compare_set("run_stamp", "", schema.run_stamp()).decode()


def leave_process_group() -> None:
    """Destroy torch's process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def end_rank(error: Exception, message: str | None) -> NoReturn:
    """End one of several ranks at once: the usual way would wait for threads that wait for others.

    torchrun's summary has the error, unless this rank has lost its connection to another one.
    """
    rank = os.environ["RANK"]
    if "gloo/transport" in str(error) or isinstance(error, dist.DistError):
        message = None  # whatever a broken connection means elsewhere
        text = f"[rank {rank}] stops, because another rank has: {told(error)}"
    else:
        text = message or indent(traceback.format_exc().rstrip(), f"[rank {rank}] ")
        if message is not None:
            error.__traceback__ = error.__cause__ = None  # a traceback is for bugs
            error.args = (message,)
        with suppress(OSError):  # a full disk
            get_error_handler().record_exception(error)
    # A mistake that all ranks find is told once; of another, torchrun's summary has the message.
    if message is None or rank == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
        print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE if message else 1)
