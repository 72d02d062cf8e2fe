"""FSDP: dividing the parameters of a model among the ranks."""

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

    `dtype` is that in which blocks are gathered and compute, by default that of their weights. With
    autocast it is autocast's, which would cast gathered float32 weights and keep all of these
    copies for backward. A block with BatchNorm, whose statistics need float32, stays as it is;
    gradients are added in float32.
    """
    large_enough = SMALL * num_parameters(model)
    blocks = [x for x in blocks_of(model, with_layers=True) if num_parameters(x) > large_enough]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if shared := sorted({*names} - {name for name, _ in model.named_parameters()}):
        raise UserError(
            f"{first_few(shared)} are weights that the model has in several places, which FSDP "
            "would divide; use train_ddp.py"
        )
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
