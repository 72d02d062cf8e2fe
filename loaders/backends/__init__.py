"""The backends by name, one file each: different ways to read the rows of the plan.

All backends visit the same samples in the same order with the same augmentation.

Your own: `mine.py` in this folder with a function `mine_loader`, which takes a plan, the transform
of its `Rectangles` and the configuration, and returns a `Loader`; see `synthetic.py`.
"""

from collections.abc import Callable
from importlib import import_module

import torch

from conf.names import find
from conf.schema import Config
from loaders.describe import describe
from loaders.index import Index
from loaders.loader import Loader
from loaders.open_index import open_index
from loaders.plan import Plan
from loaders.rectangles import Rectangles
from loaders.transform import ImageTransform


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Loader, Loader]:
    """Build the loaders of images; see `loaders.build_loaders()`."""
    if cfg.loader.name == "packed":
        indexes = import_module("loaders.pack").open_pack(cfg)
    else:
        indexes = open_index(cfg.data)
    train, val = indexes["train"], indexes["val"]
    train_loader = image_loader(train, cfg, device, rank, world_size, train=True)
    val_loader = image_loader(val, cfg, device, rank, world_size, train=False)
    train_loader.info.description += val_loader.info.description
    return train_loader, val_loader


def image_loader(
    index: Index, cfg: Config, device: torch.device, rank: int, world_size: int, train: bool
) -> Loader:
    """Build the loader of this rank's samples of an index, by `loader.name`.

    Raises:
        UserError: there is no backend of this name, or the samples do not fit the configuration.
    """
    new_loader: Callable[[Plan, ImageTransform, Config], Loader] = find(
        "loaders.backends", cfg.loader.name, "loader.name", "{}_loader"
    )
    rectangles = Rectangles(index, cfg, world_size, train)
    plan = Plan(rectangles, cfg, rank, world_size)
    loader = new_loader(plan, ImageTransform(rectangles, cfg, device), cfg)
    loader.info.description = describe(rectangles)
    return loader
