"""Batches of images, from any data set, through any backend.

The index (`index/`) lists the samples, the plan (`plan/`, `augment/`) holds one row per sample and
epoch, and a backend (`backends/`) executes the rows. All backends visit the same samples in the
same order with the same augmentation.
"""

from dataclasses import replace
from functools import partial

import torch

from conf.schema import Config
from loaders.backends import ImageLoader, backend, with_fastest_parallelism
from loaders.describe import describe, warn
from loaders.index import Index
from loaders.limits import limits_explained
from loaders.open import open_splits
from loaders.plan import PlanSampler


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[ImageLoader, ImageLoader]:
    """Build the training and the validation loader of this rank; see `loaders.build_loaders()`."""
    new_loader = backend(cfg.loader.name)
    with limits_explained():
        train_index, val_index = _open_indexes(cfg)
    train_sampler = PlanSampler(train_index, cfg, rank, world_size, train=True)
    val_sampler = PlanSampler(val_index, cfg, rank, world_size, train=False)
    if cfg.loader.num_workers == "auto":  # part: tune
        new_sampler = partial(PlanSampler, train_index, cfg, rank, world_size, train=True)
        cfg = with_fastest_parallelism(cfg, new_loader, new_sampler, device)
    train_loader = new_loader(train_sampler, cfg, device)
    val_loader = new_loader(val_sampler, cfg, device)
    train_loader.samplers = [train_sampler, val_sampler]
    lines = describe(cfg, train_index, val_index)
    if rank == 0:
        warn(cfg.data, train_index)
    train_loader.info = replace(train_loader.info, description=lines)
    return train_loader, val_loader


def _open_indexes(cfg: Config) -> tuple[Index, Index]:
    if cfg.loader.name == "packed":  # part: packed
        from loaders.pack import open_pack  # python -m loaders.pack must not find it imported

        return open_pack(cfg)
    return open_splits(cfg.data)
