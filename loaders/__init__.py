"""Batches for training and evaluation, of any data.

train_loader, val_loader = build_loaders(cfg, device)
"""

from typing import Any

import torch

from conf.schema import Config
from loaders.common import DataInfo
from loaders.epoch import Loader
from loaders.layouts import has_images, layout_of


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
    builder: Any = layout_of(cfg.data)
    if has_images(cfg.data):
        import loaders.backends as builder  # own data need none of it
    train_loader, val_loader = builder.build_loaders(cfg, device, rank, world_size)
    train_loader.info.num_val_samples = val_loader.info.num_samples
    return train_loader, val_loader
