"""Batches for training and evaluation, of any data.

train_loader, val_loader = build_loaders(cfg, device)
"""

import importlib
from dataclasses import replace

import torch

from conf.errors import unknown_name
from conf.schema import Config
from loaders.loader import DataInfo, Loader

# data.layout -> function that builds its loaders, imported when used; `images`: all image layouts
LOADERS = {
    "images": "loaders.image_loaders.build_loaders",
    "own": "loaders.own.build_loaders",
}


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Loader, Loader]:
    """Build the training and the validation loader of this rank; see `Loader` for what they yield.

    Args:
        cfg: `cfg.data`, `cfg.loader`, `cfg.global_batch_size` and `cfg.seed` are used.
        device: device of the batches.
        rank: global rank of this process.
        world_size: number of ranks.

    Raises:
        UserError: the data is missing, or a value of the configuration does not fit it.
        LimitError: the machine has run out of file handles; the message names a setting to change.
    """
    kind = cfg.data.layout if cfg.data.layout in LOADERS else "images"
    if kind not in LOADERS:  # of a project without images
        raise unknown_name("data.layout", cfg.data.layout, LOADERS)
    module, _, name = LOADERS[kind].rpartition(".")
    build = getattr(importlib.import_module(module), name)
    train_loader, val_loader = build(cfg, device, rank, world_size)
    num_val_samples = val_loader.info.num_samples
    train_loader.info = replace(train_loader.info, num_val_samples=num_val_samples)
    return train_loader, val_loader
