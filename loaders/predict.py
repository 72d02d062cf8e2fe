"""Batches of samples that training has not seen, for `predict.py`: new ones and the test split."""

import copy
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from conf.errors import UserError, counted
from conf.schema import Config, DataConfig
from loaders.backends import image_loader
from loaders.file_index import file_index
from loaders.folders import images_below
from loaders.headers import read_headers
from loaders.index import Index
from loaders.limits import limits_explained
from loaders.loader import Loader
from loaders.open_index import holds_shards, open_index
from loaders.targets import Target, Unlabelled


def build_new_loader(
    cfg: Config,
    target: Target | None,
    in_channels: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[Loader, dict[str, str]]:
    """Build the loader of this rank's new samples in `data.root`, prepared as a validation split.

    Args:
        cfg: configuration of the run that trained the model, with another `data.root`.
        target: kind of targets that the model was trained on.
        in_channels: number of channels of the model's inputs, if they are images.
        device, rank, world_size: see `build_loaders()`.

    Returns:
        The loader, whose `bad` collects the samples that cannot be loaded, and reasons by path of
        images with bad headers, which are not among its samples.

    Raises:
        UserError: there are no samples, or they do not fit the model.
    """
    cfg = copy.deepcopy(cfg)
    cfg.data.on_error = "skip"  # bad files are part of the result
    if cfg.data.layout == "own":
        return _own_loader("new", cfg, target, device, rank, world_size), {}
    if cfg.loader.name == "synthetic":
        raise UserError(f"loader.name={cfg.loader.name} reads no files; use loader=pytorch")
    with limits_explained():
        index = _unlabelled_index(cfg.data, in_channels)
    if cfg.loader.name == "dali":
        cfg.data.on_error = "raise"  # it cannot leave out a file once it has read it
    loader = image_loader(index, cfg, device, rank, world_size, train=False)
    loader.info = replace(loader.info, target=target, description=index.notes)
    return loader, index.left_out


def build_test_loader(
    cfg: Config, target: Target | None, device: torch.device, rank: int = 0, world_size: int = 1
) -> Loader:
    """Build the loader of this rank's test samples; see `build_new_loader()`.

    Raises:
        UserError: the data has no test split, or is not read from its files.
    """
    data = cfg.data
    if data.layout == "own":
        return _own_loader("test", cfg, target, device, rank, world_size)
    if holds_shards(data) or cfg.loader.name == "packed":
        raise UserError(
            f"split=test: loader.name={cfg.loader.name} data.root={data.root} has training and "
            "validation alone; read the files: loader=pytorch data.root=FOLDER"
        )
    with limits_explained():
        index = open_index(data, ("train", "test")).get("test")
    if index is None:
        raise UserError(
            f"split=test: data={data.layout} data.root={data.root} has no test split, or it chose "
            "the best epoch, as there is no val; use split=val (docs/splits.md)"
        )
    return image_loader(index, cfg, device, rank, world_size, train=False)


def _own_loader(
    split: str,
    cfg: Config,
    target: Target | None,
    device: torch.device,
    rank: int,
    world_size: int,
) -> Loader:
    """Build the loader of new samples or of the test split of your own data."""
    own_data = import_module("loaders.own_data")  # images need none of it

    data = own_data.open_split(cfg, split)
    if data is None:
        raise UserError(f"data=own has no split {split}: its function returned None; use split=val")
    loader: Loader = own_data.own_loader(split, data, cfg, device, rank, world_size)
    loader.info = replace(loader.info, target=target)
    return loader


def _unlabelled_index(data: DataConfig, channels: int) -> Index:
    """Build the index of the images below `data.root`, for a model whose inputs have `channels`.

    With one channel, photos become grey; `data.layout=cells` keeps the channels of the files.

    Raises:
        UserError: `data.root` is not a folder or has no image, or the images have other channels
            than the model takes.
    """
    if not Path(data.root).is_dir():
        raise UserError(
            f"data.root={data.root} is not a folder; set data.root to the folder of the images"
        )
    content = "stored" if data.layout == "cells" else "rgb"
    others: Counter[str] = Counter()
    paths = images_below(Path(data.root), others, data.root)
    files = read_headers(paths, data, content, others)
    if content == "rgb" and channels == 1:
        files.headers["channels"] = 1
    name = f"data.root={data.root}"
    index = file_index(name, data.root, (files,), Unlabelled())
    if index.inputs.channels != channels:
        raise UserError(
            f"{name} has images of {counted(index.inputs.channels, 'channel')}, but the model was "
            f"trained on {channels}; use images of the kind that it was trained on"
        )
    return index
