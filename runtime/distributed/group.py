"""Exchange of small values between the ranks of a run."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from loaders.batch import map_leaves
from runtime.group import SingleProcess
from runtime.shards import is_sharded

T = TypeVar("T")


class ProcessGroup(SingleProcess):
    """Ranks of the run, which exchange small values by gloo."""

    def __init__(self, handle: Any = None) -> None:
        """Use torch's process group `handle` of all ranks, by default the one that they joined."""
        self.handle = handle
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.pending: Any = None  # flags, and the work that exchanges them

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        answer = self.pending_flags()
        shared = torch.tensor(flags, dtype=torch.int32)
        work = dist.all_reduce(shared, dist.ReduceOp.MAX, self.handle, async_op=True)
        self.pending = shared, work
        return answer

    def pending_flags(self) -> list[bool]:
        if self.pending is None:
            return []
        (shared, work), self.pending = self.pending, None
        work.wait()
        return shared.bool().tolist()

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, self.handle)
        return values

    def broadcast_from_rank0(self, read: Callable[[], T]) -> T:
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
        dist.all_reduce(tensor, group=self.handle)
        return tensor / self.world_size

    def full_tensor(self, tensor: Any) -> Tensor:
        """Return the full tensor of one that is sharded over the ranks; every rank calls it."""
        return tensor.full_tensor() if is_sharded(tensor) else tensor
