"""Models that are spread over ranks."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from conf.schema import Config
from runtime.distributed.fsdp import shard
from runtime.guard import BATCH_NORMS

log = logging.getLogger(__name__)


def convert_sync_batchnorm(cfg: Config, model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with SyncBatchNorm on CUDA, unless `distributed.sync_batchnorm` is off."""
    has_any = any(isinstance(m, BATCH_NORMS) for m in model.modules())
    if not cfg.distributed.sync_batchnorm or not has_any:
        return model
    if device.type != "cuda":
        log.info("SyncBatchNorm needs CUDA: on the CPU each rank normalises by its own part")
        return model
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def sync_buffers(state: dict[str, Any]) -> None:
    """Broadcast rank 0's buffers of all modules in the state, such as BatchNorm's statistics."""
    for part in state.values():
        if isinstance(part, nn.Module):
            for buffer in part.buffers():
                dist.broadcast(buffer, src=0)


# part: ema
def place_like(copy: nn.Module, model: nn.Module) -> None:
    """Move a copy of a model to the model's device, sharded over the ranks where the model is."""
    device = next(model.parameters()).device
    if isinstance(model, FSDPModule):  # part: fsdp
        shard(copy, device)
    copy.to(device)


# part: accumulate
def set_gradient_sync(model: nn.Module, syncs: bool) -> None:
    """Choose if the next backward exchanges gradients; to be called before forward.

    Does nothing without DDP or FSDP.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif isinstance(model, FSDPModule):  # part: fsdp
        model.set_requires_gradient_sync(syncs)
