"""Ordinary map-style Datasets, which the files of `loaders/own/` return, by `data.name`."""

import copy
import sys
from dataclasses import replace
from typing import Any

import torch

from conf.data.own import OwnConfig
from conf.errors import UserError, told
from conf.names import find
from conf.schema import Config
from loaders.common import limits_explained
from loaders.datasets import OwnLoader
from loaders.epoch import EpochSampler
from loaders.targets import Target


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[OwnLoader, OwnLoader]:
    """Build the training and the validation loader of this rank; see `loaders.build_loaders()`."""
    returned = _returned("{}" if cfg.data.fold is None else "fold_{}", cfg)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise UserError(
            f"the function of data.name={_name(cfg)} returned {type(returned).__name__}; return "
            "(train, val) or (train, val, kind of the targets)"
        )
    train, val, target = (*returned, None)[:3]
    ranks = rank, world_size
    train_loader = _loader("train", train, cfg, target, device, *ranks)
    val_loader = _loader("val", val, cfg, target, device, *ranks)
    train_loader.samplers = [train_loader.sampler, val_loader.sampler]
    line = f"{_name(cfg)}: {len(train):,} training and {len(val):,} validation samples"
    line += f", {target.describe()}" if target else ""
    lines = (line, *train_loader.info.description)
    train_loader.info = replace(train_loader.info, description=lines)
    return train_loader, val_loader


def build_new_loader(
    cfg: Config, target: Target | None, device: torch.device, rank: int = 0, world_size: int = 1
) -> OwnLoader:
    """Build the loader of new samples; see `loaders.prediction.build_new_loader()`."""
    cfg = copy.deepcopy(cfg)
    cfg.data.on_error, cfg.data.max_bad_samples = "skip", sys.maxsize  # they are part of the result
    return _loader("new", _returned("new_{}", cfg), cfg, target, device, rank, world_size)


def build_test_loader(
    cfg: Config, target: Target | None, device: torch.device, rank: int = 0, world_size: int = 1
) -> OwnLoader:
    """Build the loader of the test split; see `loaders.prediction.build_test_loader()`."""
    return _loader("test", _returned("test_{}", cfg), cfg, target, device, rank, world_size)


def _loader(
    split: str,
    data: Any,
    cfg: Config,
    target: Target | None,
    device: torch.device,
    rank: int,
    world_size: int,
) -> OwnLoader:
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(
            f"data.name={_name(cfg)}: {type(data).__name__} has no __getitem__ and __len__; for "
            "data that streams, write a loader (docs/own_data.md)"
        )
    name, is_train = f"{_name(cfg)}/{split}", split == "train"
    sampler = EpochSampler(name, len(data), cfg, rank, world_size, is_train)
    return OwnLoader(data, target, sampler, cfg, device)


def _returned(form: str, cfg: Config) -> Any:
    """Return what a function of `data.name` returns, which is called `form`."""
    build = find("loaders.own", _name(cfg), "data.name", form)
    if cfg.loader.name != "pytorch" or cfg.loader.num_workers == "auto":
        raise UserError(
            f"loader.name={cfg.loader.name} loader.num_workers={cfg.loader.num_workers} is for "
            "images; with data=own use loader=pytorch and a number of workers"
        )
    try:
        with limits_explained():
            return build(cfg.data)
    except FileNotFoundError as error:
        raise UserError(
            f"data.name={_name(cfg)} data.root={cfg.data.root}: {told(error)}"
        ) from error


def _name(cfg: Config) -> str:
    assert isinstance(cfg.data, OwnConfig)
    return str(cfg.data.name)
