"""Models that are spread over ranks."""

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from runtime.guard import BATCH_NORMS

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

ENOUGH_SAMPLES = 16
"""Samples per device from which BatchNorm usually does as well without synchronisation."""

NOT_CALLED = (nn.ModuleList, nn.ModuleDict)
LISTS = (*NOT_CALLED, nn.Sequential)

LARGE, SMALL = 0.1, 0.01
"""Shares of the parameters: FSDP divides larger blocks, and gathers smaller ones with the model."""


def convert_sync_batchnorm(cfg: "Config", model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with SyncBatchNorm on CUDA, unless `distributed.sync_batchnorm` is off."""
    has_any = any(isinstance(m, BATCH_NORMS) for m in model.modules())
    if not cfg.distributed.sync_batchnorm or not has_any:
        return model
    if device.type != "cuda":
        log.info("SyncBatchNorm needs CUDA: on the CPU each rank normalises by its own part")
        return model
    if cfg.model.compile:
        log.info("SyncBatchNorm splits a compiled model; distributed.sync_batchnorm=false does not")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    size = cfg.global_batch_size // world_size
    size //= cfg.accumulate_steps  # part: accumulate
    if size >= ENOUGH_SAMPLES:
        log.info(
            "SyncBatchNorm waits for all ranks in each layer; with %d samples per device, "
            "statistics of each device alone usually do as well: distributed.sync_batchnorm=false",
            size,
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def sync_buffers(state: dict[str, Any]) -> None:
    """Broadcast rank 0's buffers of all modules in the state, such as BatchNorm's statistics."""
    for part in state.values():
        if isinstance(part, nn.Module):
            for buffer in part.buffers():
                dist.broadcast(buffer, src=0)


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to the device block by block; each rank keeps its shard of every parameter.

    A block is gathered while it computes. Blocks are the model's children and those of a
    ModuleList; a child with many parameters is divided at the ModuleLists and Sequentials inside
    it. They have to be called as modules: outside its `forward`, a block's parameters are shards.
    Children with few parameters are gathered with the model's own.

    Weights in channels_last become contiguous, as FSDP needs; inputs and activations may stay so.

    With `gather_in()`, blocks without BatchNorm, whose statistics need float32 weights, are
    gathered and compute in that dtype; gradients are added in float32.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = getattr(model, "gather_dtype", None)
    for block in [*_blocks(model, _num_parameters(model)), model]:
        for parameter in block.parameters():
            if not isinstance(parameter, DTensor):  # those of blocks inside it are
                parameter.data = parameter.data.contiguous()
        has_statistics = any(isinstance(module, BATCH_NORMS) for module in block.modules())
        policy = MixedPrecisionPolicy(None if has_statistics else dtype, torch.float32)
        fully_shard(block, mesh=mesh, mp_policy=policy)  # moves it, too
    return model


def place_like(copy: nn.Module, model: nn.Module) -> None:
    """Move a copy of a model to the model's device, sharded over the ranks where the model is."""
    device = next(model.parameters()).device
    if isinstance(model, FSDPModule):
        shard(copy, device)
    copy.to(device)


def _blocks(module: nn.Module, total: int) -> list[nn.Module]:
    """Yield the blocks inside a module of a model with `total` parameters."""
    blocks = []
    for child in module.children():
        size = _num_parameters(child)
        has_list = any(isinstance(inner, LISTS) for inner in child.modules())
        if isinstance(child, NOT_CALLED) or (has_list and size > LARGE * total):
            blocks += _blocks(child, total)
        elif size > SMALL * total:
            blocks.append(child)
    return blocks


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def set_gradient_sync(model: nn.Module, syncs: bool) -> None:
    """Choose if the next backward exchanges gradients; to be called before forward.

    Does nothing without DDP or FSDP.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(syncs)
