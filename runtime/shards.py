"""Tensors of which each rank has a shard, as `train_fsdp.py` makes them. Nothing here imports
PyTorch's classes for them, which takes seconds: a model that has some has imported them."""

from typing import Any

from torch import Tensor


def is_sharded(value: Any) -> bool:
    """Return True for a tensor of which each rank has a shard."""
    return hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient; of one that is sharded, this rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
