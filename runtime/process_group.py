"""The processes of a run, one or many: their exchange of small values, their name and their end."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from conf import schema
from conf.cli import EXIT_CODE
from conf.credentials import masked
from conf.errors import UserError, told
from loaders.batch import map_leaves
from runtime import preemption
from runtime.shards import is_sharded

T = TypeVar("T")

WAIT_S = 10.0
"""Seconds that other ranks leave rank 0 to tell a mistake."""


class ProcessGroup:
    """Ranks of a run, which exchange small values by gloo; a process alone exchanges nothing.

    Attributes:
        rank: number of this process in the run, from 0.
        world_size: number of processes of the run.
    """

    def __init__(self, handle: Any = None) -> None:
        """Use torch's process group `handle` of all ranks; None: this process is alone."""
        self.handle = handle
        self.rank, self.world_size = 0, 1
        if handle is not None:
            self.rank, self.world_size = dist.get_rank(handle), dist.get_world_size(handle)
        self.pending: Any = None  # flags, and the work that exchanges them

    def duplicate(self) -> "ProcessGroup":
        """Return the same ranks, whose messages do not mix with those of this group; every rank
        calls it."""
        if self.world_size == 1:
            return self
        return ProcessGroup(dist.new_group(backend="gloo"))

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag if it is set on any rank; every rank calls it in every step.

        With several ranks, it returns the result of the previous call, and at first an empty list:
        no rank waits for another.
        """
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
        value: Any = None
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                value = read()
                answer[0] = map_leaves(
                    lambda x: x.to("meta") if isinstance(x, Tensor) else x, value
                )
            except Exception as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0, group=self.handle)
        if answer[1] is not None:
            raise answer[1]
        return map_leaves(self._broadcast, value if self.rank == 0 else answer[0])

    def _broadcast(self, value: Any) -> Any:
        """Return rank 0's tensor in place of its shape and dtype. It is sent by itself, without a
        copy in a pickle."""
        if not isinstance(value, Tensor):
            return value
        is_sent = not value.is_meta
        tensor = value.contiguous() if is_sent else torch.empty(value.shape, dtype=value.dtype)
        dist.broadcast(tensor, src=0, group=self.handle)
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks."""
        if self.world_size == 1:
            return tensor
        dist.all_reduce(tensor, group=self.handle)
        return tensor / self.world_size

    def full_tensor(self, tensor: Any) -> Tensor:
        """Return the full tensor of one that is sharded over the ranks; every rank calls it."""
        return tensor.full_tensor() if is_sharded(tensor) else tensor


def run_stamp() -> str:
    """Return the start time of the run, the same string on every rank that torchrun started.

    Ranks start at different moments; the first to ask torchrun's key-value store decides. Without
    that store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), it is what torchrun calls the run (--rdzv_id).
    """
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
    """End one of several ranks because of an error, at once: the usual way would wait for others.

    Args:
        error: error that ends the process; torchrun's summary has it, unless the cause is another
            rank, to which this one has lost its connection.
        message: message for the user, if the user can fix the error, as on all ranks. Rank 0 prints
            it, while the others wait for torchrun to end them. None: it is a bug.
    """
    rank = int(os.environ["RANK"])
    is_of_another = "gloo/transport" in str(error) or isinstance(error, dist.DistError)
    if not is_of_another:
        with suppress(OSError):  # a full disk
            record(error, message)
    if message and rank != 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        # Not by the signal itself: torchrun's summary has seven lines on each rank that fails.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        if preemption.is_requested():  # rank 0 has told it, and torchrun ends this one already
            os._exit(0)
        time.sleep(WAIT_S)
    text = message or "".join(traceback.format_exception(error)).rstrip()
    if is_of_another:
        text = f"stops, because another rank has: {told(error)}"
    for line in masked(text).splitlines():
        print(line if message else f"[rank {rank}] {line}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_CODE if message else 1)


def record(error: Exception, message: str | None) -> None:
    """Hand torchrun an error for its summary, as its decorator `record` does; of a message for the
    user, without a traceback."""
    if message is None:
        get_error_handler().record_exception(error)
        return
    try:
        raise UserError(message) from None
    except UserError as mistake:
        get_error_handler().record_exception(mistake.with_traceback(None))
