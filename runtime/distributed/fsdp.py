"""Dividing the parameters of a model among the ranks."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from conf.errors import UserError, first_few
from runtime.guard import BATCH_NORMS

NOT_CALLED = (nn.ModuleList, nn.ModuleDict)
LISTS = (*NOT_CALLED, nn.Sequential)

LARGE, SMALL = 0.1, 0.01
"""Shares of the parameters: FSDP divides larger blocks, and gathers smaller ones with the model."""


def shard(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Move a model to the device block by block; each rank keeps its shard of every parameter.

    A block is gathered while it computes. Blocks are the model's children and those of a
    ModuleList; a child with many parameters is divided at the ModuleLists and Sequentials inside
    it. They have to be called as modules: outside its `forward`, a block's parameters are shards.
    Children with few parameters are gathered with the model's own.

    Weights in channels_last become contiguous, as FSDP needs them; inputs and activations may keep
    channels_last.

    Args:
        model: model on the CPU.
        device: device of this rank.
        dtype: dtype in which blocks are gathered and compute, by default that of their weights.
            With autocast it is autocast's, which would cast gathered float32 weights and keep all
            of these copies for backward. A block with BatchNorm, whose statistics need float32,
            stays as it is; gradients are added in float32.

    Raises:
        UserError: a parameter is a scalar, or belongs to two blocks.
    """
    blocks = _blocks(model, _num_parameters(model))
    _check_parameters(model, blocks)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in [*blocks, model]:
        for parameter in block.parameters():
            if not isinstance(parameter, DTensor):  # those of blocks inside it are
                parameter.data = parameter.data.contiguous()
        has_statistics = any(isinstance(module, BATCH_NORMS) for module in block.modules())
        policy = MixedPrecisionPolicy(None if has_statistics else dtype, torch.float32)
        # Moves it, too. After forward the model's own parameters become shards again, as those of
        # its blocks: an average of the weights is exchanged with shards.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def _blocks(module: nn.Module, total: int) -> list[nn.Module]:
    """Return the blocks inside a module of a model with `total` parameters."""
    blocks = []
    for child in module.children():
        size = _num_parameters(child)
        has_list = any(isinstance(inner, LISTS) for inner in child.modules())
        if isinstance(child, NOT_CALLED) or (has_list and size > LARGE * total):
            blocks += _blocks(child, total)
        elif size > SMALL * total:
            blocks.append(child)
    return blocks


def _check_parameters(model: nn.Module, blocks: list[nn.Module]) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, (name, *_) in names.items():
        if parameter.ndim == 0:
            raise UserError(
                f"{name} is a parameter without dimensions, which FSDP cannot divide; "
                "use torch.ones(1) in place of torch.ones(()), or train_ddp.py"
            )
    for block in blocks:
        here = Counter(parameter for _, parameter in block.named_parameters(remove_duplicate=False))
        for parameter, count in here.items():
            if count < len(names[parameter]):  # FSDP would leave each of them weights of its own
                raise UserError(
                    f"{first_few(names[parameter])} are one weight in several blocks of the model, "
                    "which FSDP cannot divide; use train_ddp.py"
                )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
