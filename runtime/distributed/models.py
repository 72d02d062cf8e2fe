"""Models that are spread over ranks."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conf.schema import Config
from runtime.guard import BATCH_NORMS

log = logging.getLogger(__name__)


def convert_sync_batchnorm(cfg: Config, model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model with SyncBatchNorm on CUDA, unless `distributed.sync_batchnorm` is off."""
    if cfg.distributed.sync_batchnorm and device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if cfg.distributed.sync_batchnorm and any(isinstance(m, BATCH_NORMS) for m in model.modules()):
        log.info("SyncBatchNorm needs CUDA: on the CPU each rank normalises by its own share")
    return model


def sync_buffers(state: dict[str, Any]) -> None:
    """Broadcast rank 0's buffers of the models in the state, such as BatchNorm's statistics."""
    for value in state.values():
        if hasattr(value, "buffers"):
            for buffer in value.buffers():
                dist.broadcast(buffer, src=0)
