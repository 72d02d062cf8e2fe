"""The backends by name, one file each: different ways to read the rows of the plan.

All backends visit the same samples in the same order with the same augmentation.

Your own: `mine.py` in this folder with a function `mine_loader`, which takes a plan whose samples
are `Rectangles`, the configuration and the device, and returns a `Loader`; see `synthetic.py`.
"""

from collections.abc import Callable
from importlib import import_module

import torch

from conf.errors import UserError
from conf.names import find
from conf.schema import Config
from loaders.describe import describe, warn
from loaders.index import Index
from loaders.limits import limits_explained
from loaders.loader import Loader
from loaders.open_index import holds_shards, open_index
from loaders.plan import Plan
from loaders.rectangles import Rectangles


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Loader, Loader]:
    """Build the loaders of images; see `loaders.build_loaders()`."""
    with limits_explained():
        train_index, val_index = open_splits(cfg)
    train_loader, val_loader = (
        image_loader(index, cfg, device, rank, world_size, train=index is train_index)
        for index in (train_index, val_index)
    )
    lines = describe(cfg.data, train_index, val_index)
    train_loader.info.description = lines + train_loader.info.description
    if rank == 0:
        warn(cfg.data, (train_index, val_index))
    return train_loader, val_loader


def open_splits(cfg: Config) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split, of the pack `loader.pack` with
    `loader=packed`.

    Raises:
        UserError: see `open_index`.
    """
    is_packed = cfg.loader.name == "packed"
    if cfg.data.shuffle == "window" and (is_packed or not holds_shards(cfg.data)):
        raise UserError("data.shuffle=window needs data in shards; use data.shuffle=full")
    if is_packed:
        train, val = import_module("loaders.pack").open_pack(cfg)
        return train, val
    indexes = open_index(cfg.data)
    return indexes["train"], indexes["val"]


def image_loader(
    index: Index, cfg: Config, device: torch.device, rank: int, world_size: int, train: bool
) -> Loader:
    """Build the loader of this rank's samples of an index, by `loader.name`.

    Raises:
        UserError: there is no backend of this name, or the samples do not fit the configuration.
    """
    new_loader: Callable[[Plan, Config, torch.device], Loader] = find(
        "loaders.backends", cfg.loader.name, "loader.name", "{}_loader"
    )
    plan = Plan(Rectangles(index, cfg, world_size, train), cfg, rank, world_size)
    return new_loader(plan, cfg, device)
