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
from conf.errors import UserError, told
from runtime import preemption
from runtime.shards import is_sharded

T = TypeVar("T")

WAIT_S = 10.0
"""Seconds that other ranks leave rank 0 to tell a mistake, before they tell it, too."""


class ProcessGroup:
    """Ranks of a run, which exchange small values by gloo; a process alone exchanges nothing."""

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
    """End one of several ranks at once: the usual way would wait for threads that wait for others.

    torchrun's summary has the error, as of a `main` with its decorator `record`, unless this rank
    has lost its connection to another one. Rank 0 tells a user's mistake, which all ranks find, and
    torchrun ends the others meanwhile.
    """
    rank = int(os.environ["RANK"])
    text = message or traceback.format_exc().rstrip()
    if "gloo/transport" in str(error) or isinstance(error, dist.DistError):
        message = None  # whatever a broken connection means elsewhere
        text = f"stops, because another rank has: {told(error)}"
    elif message and rank != 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if preemption.is_requested():  # torchrun ends this rank already
            os._exit(EXIT_CODE)
        time.sleep(WAIT_S)
    else:
        with suppress(OSError):  # a full disk
            _record(error, message)
    for line in text.splitlines():
        print(line if message else f"[rank {rank}] {line}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_CODE if message else 1)


def _record(error: Exception, message: str | None) -> None:
    """Hand torchrun the error that is being handled; of a user's mistake, the message alone."""
    if message is None:
        get_error_handler().record_exception(error)
        return
    try:
        raise UserError(message) from None
    except UserError as mistake:
        get_error_handler().record_exception(mistake)
