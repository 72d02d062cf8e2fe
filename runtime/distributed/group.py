"""Exchange of small values between the ranks of a run."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from loaders.common import map_leaves
from runtime.group import SingleProcess

T = TypeVar("T")


class ProcessGroup(SingleProcess):
    """Ranks of the run, which exchange small values by gloo."""

    def __init__(self, handle: Any = None) -> None:
        """Use torch's process group `handle` of all ranks, by default the one that they joined."""
        self.handle = handle
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.flags: Tensor | None = None
        self.work: Any = None

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        answer = self.pending_flags()
        self.flags = torch.tensor(flags, dtype=torch.int32)
        self.work = dist.all_reduce(self.flags, dist.ReduceOp.MAX, self.handle, async_op=True)
        return answer

    def pending_flags(self) -> list[bool]:
        if self.flags is None:
            return []
        self.work.wait()
        answer, self.flags = self.flags.bool().tolist(), None
        return answer

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

    def shard_like(self, tensor: Tensor, example: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) or not isinstance(example, DTensor):
            return tensor
        # Every rank has the full tensor: nothing has to be sent.
        full, mesh = tensor.to(example.device), example.device_mesh
        return distribute_tensor(full, mesh, example.placements, src_data_rank=None)

    def read_shards(self, saved: dict[str, Any], model: nn.Module) -> Any:
        parameter = next(model.parameters())
        if "shards" in saved and isinstance(parameter, DTensor):
            fsdp = import_module("runtime.fsdp")  # other models have no shards
            return fsdp.read_shards(saved, parameter.device_mesh)
        return super().read_shards(saved, model)

    def for_writing(self, model: nn.Module) -> SingleProcess:
        is_sharded = isinstance(next(model.parameters()), DTensor)
        return ProcessGroup(dist.new_group(backend="gloo")) if is_sharded else self

    def write_shards(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        if not any(isinstance(value, DTensor) for value in state.get("model", {}).values()):
            return state
        return import_module("runtime.fsdp").write_shards(state, folder, self)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return the full tensor of one that is sharded over the ranks; every rank calls it."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
