"""Ordinary map-style Datasets, which the files of `loaders/own/` return, by `data.name`."""

import copy
import sys
from dataclasses import replace
from typing import Any

import torch

from conf.data.own import OwnConfig
from conf.errors import UserError, told
from conf.names import file_of, find
from conf.schema import Config
from loaders.common import limits_explained
from loaders.datasets import OwnLoader
from loaders.epoch import EpochSampler
from loaders.targets import Target


def name_of(cfg: Config) -> str:
    """Return `data.name`."""
    assert isinstance(cfg.data, OwnConfig)
    return str(cfg.data.name)


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[OwnLoader, OwnLoader]:
    """Build the training and the validation loader of this rank; see `loaders.build_loaders()`."""
    name = name_of(cfg)
    datasets = _returned("{}" if cfg.data.fold is None else "fold_{}", cfg)
    if not isinstance(datasets, tuple) or len(datasets) not in (2, 3):
        raise UserError(
            f"the function of data.name={name} returned {type(datasets).__name__}; return "
            "(train, val) or (train, val, kind of the targets)"
        )
    train, val, target = (*datasets, None)[:3]
    for data in (train, val):
        _refuse_streams(name, data)
    samplers = [
        EpochSampler(f"{name}/{split}", len(data), cfg, rank, world_size, split == "train")
        for split, data in (("train", train), ("val", val))
    ]
    train_loader = OwnLoader(train, target, samplers[0], cfg, device)
    val_loader = OwnLoader(val, target, samplers[1], cfg, device)
    train_loader.samplers = samplers
    line = f"{name}: {len(train):,} training and {len(val):,} validation samples"
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
    return _loader("new", cfg, target, device, rank, world_size)


def build_test_loader(
    cfg: Config, target: Target | None, device: torch.device, rank: int = 0, world_size: int = 1
) -> OwnLoader:
    """Build the loader of the test split; see `loaders.prediction.build_test_loader()`."""
    return _loader("test", cfg, target, device, rank, world_size)


def _loader(
    kind: str, cfg: Config, target: Target | None, device: torch.device, rank: int, world_size: int
) -> OwnLoader:
    name = name_of(cfg)
    data = _returned(f"{kind}_{{}}", cfg)
    _refuse_streams(name, data)
    sampler = EpochSampler(f"{name}/{kind}", len(data), cfg, rank, world_size, train=False)
    return OwnLoader(data, target, sampler, cfg, device)


def _returned(form: str, cfg: Config) -> Any:
    """Return what a function of `data.name` returns, which is called `form`."""
    name = name_of(cfg)
    wanted = form.format(name)
    if wanted != name and not hasattr(file_of("loaders.own", name, "data.name"), wanted):
        raise UserError(
            f"data.name={name} has no function {wanted} in loaders/own/{name}.py; add one, or use "
            "split=val without data.fold"
        )
    build = find("loaders.own", name, "data.name", form)
    if cfg.loader.name != "pytorch" or cfg.loader.num_workers == "auto":
        raise UserError(
            f"loader.name={cfg.loader.name} loader.num_workers={cfg.loader.num_workers} is for "
            "images; with data=own use loader=pytorch and a number of workers"
        )
    try:
        with limits_explained():
            return build(cfg.data)
    except FileNotFoundError as error:
        raise UserError(f"data.name={name} data.root={cfg.data.root}: {told(error)}") from error


def _refuse_streams(name: str, data: Any) -> None:
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(
            f"data.name={name}: {type(data).__name__} has no __getitem__ and __len__; for data "
            "that streams, write a loader (docs/own_data.md)"
        )
