"""Parts of the template that several benchmarks use: configuration, loaders and models."""

from collections.abc import Iterator
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from torch import nn

from conf.cli import load_config
from conf.schema import Config
from loaders import build_loaders
from models import build_model
from runtime.optimizer import build_optimizer
from runtime.setup import seed_everything, set_numerics
from tasks import build_task


def make_config(*overrides: str) -> Config:
    """Configuration with these command-line overrides.

    Raises:
        UserError, HydraException, OmegaConfBaseException: an override is wrong.
    """
    GlobalHydra.instance().clear()
    return load_config(overrides)


def endless(loader: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a loader, epoch after epoch."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def parts(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1, distributed: bool = False
) -> tuple[Any, Any, nn.Module, torch.optim.Optimizer, Any]:
    """Loader, task, model (as `train_ddp.py` wraps it if `distributed`), optimizer, scheduler."""
    set_numerics(cfg)
    seed_everything(cfg.seed)
    loader = build_loaders(cfg, device, rank, world_size)[0]
    task = build_task(cfg, loader)
    model = build_model(cfg.model, loader.in_channels, task.num_outputs)
    model = model.to(device)
    if distributed:
        from runtime.distributed import convert_sync_batchnorm  # its import takes a second

        model = convert_sync_batchnorm(cfg, model, device)
    optimizer, scheduler = build_optimizer(cfg, model, len(loader))
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
        model.broadcast_buffers = False
    return loader, task, model, optimizer, scheduler
