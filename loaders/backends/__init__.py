"""The backends by name, one file each: different ways to execute the rows of the plan.

The index (`index/`) lists the samples of images, the plan (`plan/`, `augment/`) holds one row per
sample and epoch, and a backend executes the rows. All backends visit the same samples in the same
order with the same augmentation.

Your own: a `MineLoader` in `mine.py` in this folder. If it has an index of its own, a function
`open_indexes` beside it takes the configuration and returns that of each split.
"""

from collections.abc import Callable
from typing import Any

import torch

from conf.names import file_of, find
from conf.schema import Config
from loaders.backends.common import ImageLoader, default_workers, with_fastest_parallelism
from loaders.common import limits_explained
from loaders.index import open_splits
from loaders.plan import PlanSampler, describe, warn


def backend(name: str) -> Callable[[PlanSampler, Config, torch.device], ImageLoader]:
    """Return the class or function that makes the loader `loader.name`.

    Raises:
        UserError: there is no backend of this name.
    """
    return find("loaders.backends", name, "loader.name", "{}Loader")


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[ImageLoader, ImageLoader]:
    """Build the training and the validation loader of this rank; see `loaders.build_loaders()`."""
    new_loader = backend(cfg.loader.name)
    file = file_of("loaders.backends", cfg.loader.name, "loader.name")
    open_indexes: Any = getattr(file, "open_indexes", lambda cfg: open_splits(cfg.data))
    with limits_explained():
        train_index, val_index = open_indexes(cfg)

    def new_train_loader(cfg: Config) -> ImageLoader:
        return new_loader(PlanSampler(train_index, cfg, rank, world_size, True), cfg, device)

    if cfg.loader.num_workers == "auto" and cfg.loader.name != "synthetic":
        cfg = with_fastest_parallelism(cfg, new_train_loader)
    train_loader = new_train_loader(cfg)
    val_sampler = PlanSampler(val_index, cfg, rank, world_size, train=False)
    val_loader = new_loader(val_sampler, cfg, device)
    train_loader.samplers.append(val_sampler)
    lines = describe(cfg.data, train_index, val_index)
    train_loader.info.description = lines + train_loader.info.description
    if rank == 0:
        warn(cfg.data, train_index)
    return train_loader, val_loader
