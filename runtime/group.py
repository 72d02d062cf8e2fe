"""What the machinery asks of the other processes of a run, and the answers where there are none."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Alone:
    """One process, which agrees with itself; `runtime.distributed.ProcessGroup` asks other ranks.

    Attributes:
        rank: number of this process in the run, from 0.
        world_size: processes of the run.
    """

    rank = 0
    world_size = 1

    def agree(self, wishes: Sequence[bool]) -> list[bool]:
        """To be called by every rank in every step: which wishes any rank had.

        With several ranks, these are the wishes of the call before: nobody waits for an answer.
        """
        return list(wishes)

    def last_agreement(self) -> list[bool]:
        """The wishes of the last call of `agree()`, if it did not return them itself."""
        return []

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        return [value]

    def from_rank_0(self, read: Callable[[], T]) -> T:
        """What `read` returns or raises on rank 0, on every rank; tensors must be on the CPU."""
        return read()

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all ranks."""
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor whose parts lie on the ranks; every rank calls it."""
        return tensor

    def part_like(self, tensor: Tensor, example: Tensor) -> Tensor:
        """Of a whole tensor this rank's part, if `example` is split over the ranks."""
        return tensor
