"""Where the benchmarks touch the template: its configuration, loaders, models, and process group.

All other modules of this package use these functions only (and `loop_overhead` starts `train.py`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from torch import nn

from benchmarks.records import REPOSITORY
from conf.schema import Config, DataConfig
from loaders import build_loaders
from loaders.generate import generate
from loaders.layouts import build_index
from loaders.pack import pack
from models import build_model
from runtime.optimizer import build_optimizer
from runtime.setup import amp_dtype, resolve_device, seed_everything
from tasks import build_task

__all__ = [
    "Config",
    "DataConfig",
    "amp_dtype",
    "build_loaders",
    "generate",
    "pack",
    "resolve_device",
]


class Parts(NamedTuple):
    """What an entry point builds before its loop."""

    loader: Any
    task: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any


def make_config(*overrides: str) -> Config:
    """The configuration that these command-line overrides give.

    Raises:
        HydraException, OmegaConfBaseException: an override is wrong.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return cast(Config, compose("config", list(overrides)))


def train_loader(cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1) -> Any:
    return build_loaders(cfg, device, rank, world_size)[0]


def endless(loader: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Its batches, epoch after epoch."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader
        epoch += 1


def chosen_parallelism(cfg: Config, device: torch.device) -> tuple[int, int]:
    """Workers and threads that `loader.num_workers=auto` chooses."""
    loader = train_loader(cfg, device).cfg.loader
    return loader.num_workers, loader.num_threads


def files_of(cfg: Config, train: bool = True) -> tuple[list[str], ...]:
    """Paths of a split's images and, for pairs, of their targets."""
    return tuple(list(paths) for paths in build_index(cfg.data)[0 if train else 1].files)


def num_samples(cfg: Config) -> int:
    """Samples for training and validation."""
    return sum(len(index) for index in build_index(cfg.data))


def parts(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1, distributed: bool = False
) -> Parts:
    """Loader, task, model, optimizer and schedule; `distributed`: the model as `train_ddp.py` has it."""
    seed_everything(cfg.seed)
    loader = train_loader(cfg, device, rank, world_size)
    task = build_task(cfg, loader)
    model = build_model(cfg.model, loader.in_channels, task.num_outputs)
    if distributed and device.type == "cuda":  # the CPU has no SyncBatchNorm
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device)
    optimizer, scheduler = build_optimizer(cfg, model, len(loader))
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    return Parts(loader, task, model, optimizer, scheduler)
