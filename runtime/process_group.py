"""The processes of a run, one or many: their exchange of small values, their name and their end."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from textwrap import indent
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from conf import schema
from conf.cli import EXIT_CODE
from conf.errors import UserError, told
from runtime.shards import is_sharded

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
        self.pending: Any = None  # flags, and the work that exchanges them

    def duplicate(self) -> "ProcessGroup":
        """Return the same ranks, with messages that do not mix with those of this group."""
        return ProcessGroup(dist.new_group(backend="gloo")) if self.world_size > 1 else self

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag if it is set on any rank. With several ranks, it is the result of
        the previous call, and at first an empty list: a rank waits for the others' previous
        step, not for this one."""
        if self.world_size == 1:
            return list(flags)
        answer = self.pending_flags()
        shared = torch.tensor(flags, dtype=torch.int32)
        work = dist.all_reduce(shared, dist.ReduceOp.MAX, self.handle, async_op=True)
        self.pending = shared, work
        return answer

    def pending_flags(self) -> list[bool]:
        """Return the result of the last `any_rank()`; an empty list if it was returned before."""
        if self.pending is None:
            return []
        (shared, work), self.pending = self.pending, None
        work.wait()
        return shared.bool().tolist()

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
        with suppress(OSError):  # a full disk
            _record(error, message)
        text = message or indent(traceback.format_exc().rstrip(), f"[rank {rank}] ")
    # A mistake that all ranks find is told once; of another, torchrun's summary has the message.
    if message is None or rank == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
        print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE if message else 1)


def _record(error: Exception, message: str | None) -> None:
    """Hand torchrun the error that is being handled; of a user's mistake, the message alone."""
    if message is None:
        get_error_handler().record_exception(error)
        return
    try:
        raise UserError(message) from None  # instead of its traceback
    except UserError as mistake:
        get_error_handler().record_exception(mistake)
