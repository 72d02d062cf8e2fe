"""Batches for training and evaluation, of any data.

train_loader, val_loader = build_loaders(cfg, device)
"""

from importlib import import_module
from typing import Any

import torch

from conf.names import find
from conf.schema import Config
from loaders.info import DataInfo
from loaders.loader import Loader


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Loader, Loader]:
    """Build the training and the validation loader of this rank; see `Loader` for what they yield.

    Args:
        cfg: `cfg.data`, `cfg.loader`, `cfg.global_batch_size`, `cfg.epoch_steps` and `cfg.seed` are
            used.
        device: device of the batches.
        rank: global rank of this process.
        world_size: number of ranks.

    Raises:
        UserError: the data is missing, or a value of the configuration does not fit it.
    """
    layout: Any = None
    if cfg.data.layout != "own":
        layout = find("loaders.layouts", cfg.data.layout, "data.layout")
    if isinstance(layout, type):  # a class of loaders
        train_loader, val_loader = (
            layout(cfg, split, device, rank, world_size) for split in ("train", "val")
        )
    else:
        # Images need nothing of own data, and own data nothing of images.
        builder = import_module("loaders.own_data" if layout is None else "loaders.backends")
        train_loader, val_loader = builder.build_loaders(cfg, device, rank, world_size)
        name, info = train_loader.plan.samples.name.rpartition("/")[0], train_loader.info
        line = f"{name}: {info.num_samples:,} training and {val_loader.info.num_samples:,} "
        line += "validation samples"
        if info.target:
            line += f", {info.target.describe()}"
        info.description = (line, *info.description)
    train_loader.info.num_val_samples = val_loader.info.num_samples
    return train_loader, val_loader
