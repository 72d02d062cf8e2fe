"""Process group of a run with a single process; it exchanges nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from conf.errors import UserError

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

    def shard_like(self, tensor: Tensor, example: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor if `example` is sharded, else the tensor."""
        return tensor

    def read_shards(self, saved: dict[str, Any], model: nn.Module) -> Any:
        """Return a checkpoint, with its `path`, with this rank's shards of its sharded tensors.

        Raises:
            UserError: a rank cannot read them, or the model is not sharded.
        """
        if "shards" in saved:
            raise UserError(
                f"{saved['path']} is in shards, which train_fsdp.py alone resumes from; make whole "
                "files of the checkpoints of its run: python -m runtime.whole run=DIR"
            )
        return saved

    def for_writing(self, model: nn.Module) -> "SingleProcess":
        """Return these processes for the thread that writes checkpoints: with a sharded model, its
        messages to other ranks must not mix with those of the training."""
        return self

    def write_shards(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Write the sharded tensors to a new folder in `folder`; return the rest of the state and,
        if there are any, facts about them as `shards`. Raises OSError on all ranks."""
        return state
