"""Process group of a run with a single process; it exchanges nothing."""

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

        With several ranks, it returns the result of the previous call, and at first an empty list:
        no rank waits for another.
        """
        return list(flags)

    def pending_flags(self) -> list[bool]:
        """Return the result of the last `any_rank()`; an empty list if it was returned before."""
        return []

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        return [value]

    def broadcast_from_rank0(self, read: Callable[[], T]) -> T:
        """Return rank 0's result of `read`, or raise its error, on all ranks; CPU tensors only."""
        return read()

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks."""
        return tensor
