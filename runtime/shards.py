"""Tensors of which each rank has a shard, as `train_fsdp.py` makes them."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from models.pretrained import Shards


def is_sharded(value: Any) -> bool:
    """Return True for a tensor of which each rank has a shard, without an import of PyTorch's class
    for them, which takes seconds."""
    return hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return a tensor without its gradient; of one that is sharded, this rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def load_into(owner: Any, saved: Any) -> None:
    """Load a `state_dict()` that any number of ranks have saved into the owner of such a state; a
    RuntimeError if it is a module that the tensors do not fit."""
    own = owner.state_dict()
    if not isinstance(owner, Optimizer):
        saved = {name: _sharded_like(own.get(name), value) for name, value in saved.items()}
    else:
        parameters = [p for options in owner.param_groups for p in options["params"]]
        values = {
            number: {name: _laid_out(parameters[number], value) for name, value in each.items()}
            for number, each in saved["state"].items()
        }
        # The configuration decides its options, the script its kernels, the schedule the rate.
        saved = saved | {"state": values, "param_groups": own["param_groups"]}
    owner.load_state_dict(saved)


def _sharded_like(example: Any, saved: Any) -> Any:
    """Return a saved value, such as a tensor or its `Shards` in the files of any number of ranks,
    as the owner of `example`, a value of its own, can load it."""
    if isinstance(saved, Shards):
        saved = saved.whole()
    if not is_sharded(example):
        return saved
    from torch.distributed.tensor import distribute_tensor

    # Without a source rank, each takes its own part of what it has read.
    return distribute_tensor(saved, example.device_mesh, example.placements, src_data_rank=None)


def _laid_out(parameter: Tensor, value: Any) -> Any:
    """Shard an optimizer's value like its parameter, and lay it out in memory like it.

    Fused optimizers confuse elements where the layouts differ, as after a change of channels_last.
    """
    if isinstance(value, Shards):
        value = value.whole()
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value  # a number, such as Adam's of its steps
    if is_sharded(parameter):
        return _sharded_like(parameter, value)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
