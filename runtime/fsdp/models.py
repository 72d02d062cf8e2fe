"""Dividing the parameters of a model among the ranks."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from conf.errors import UserError, first_few
from runtime.blocks import BATCH_NORMS, blocks_of, num_parameters

SMALL = 0.01
"""Share of the parameters; FSDP gathers smaller blocks with the model."""


def shard(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Move a model to the device block by block; each rank keeps its shard of every parameter.

    A block, as of `blocks_of()`, is gathered while it computes. It has to be called as a module:
    outside its `forward`, its parameters are shards. Blocks with few parameters are gathered with
    the model's own.

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
        UserError: a parameter belongs to two blocks.
        ValueError: a parameter is a scalar.
    """
    large_enough = SMALL * num_parameters(model)
    blocks = [x for x in blocks_of(model, with_layers=True) if num_parameters(x) > large_enough]
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


def _check_parameters(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raise UserError for a weight of several blocks: FSDP would leave each of them its own."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for block in blocks:
        here = Counter(parameter for _, parameter in block.named_parameters(remove_duplicate=False))
        for parameter, count in here.items():
            if count < len(names[parameter]):
                raise UserError(
                    f"{first_few(names[parameter])} are one weight in several blocks of the model, "
                    "which FSDP cannot divide; use train_ddp.py"
                )
