"""Exchange of small values between the processes of a run, for a run of one process."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class SingleProcess:
    """The interface of `runtime.distributed.ProcessGroup`, for one process without others.

    Attributes:
        rank: number of this process in the run, from 0.
        world_size: number of processes of the run.
    """

    rank = 0
    world_size = 1

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag if it is set on any rank; every rank calls it in every step.

        With several ranks, the answer is about the flags of the previous call, and empty at first: no rank
        waits.
        """
        return list(flags)

    def pending_flags(self) -> list[bool]:
        """Return the answer about the flags of the last call of `any_rank()`, unless it was returned before."""
        return []

    def gather(self, value: T) -> list[T]:
        """Values of all ranks, in their order."""
        return [value]

    def broadcast_from_rank0(self, read: Callable[[], T]) -> T:
        """Return or raise on every rank what `read` does on rank 0; tensors must be on the CPU."""
        return read()

    def mean(self, tensor: Tensor) -> Tensor:
        """Mean over all ranks."""
        return tensor

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Full tensor of one that is sharded over the ranks; every rank calls it."""
        return tensor

    def shard_like(self, tensor: Tensor, example: Tensor) -> Tensor:
        """Shard of a full tensor for this rank, if `example` is sharded over the ranks."""
        return tensor
