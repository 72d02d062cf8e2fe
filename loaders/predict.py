"""Batches of samples that training has not seen, for `predict.py`: new ones and the test split."""

import copy
from collections import Counter
from importlib import import_module
from pathlib import Path

import torch

from conf.errors import UserError, counted
from conf.schema import Config
from loaders.backends import image_loader
from loaders.file_index import file_index, read_headers
from loaders.folders import describe_others, images_below
from loaders.layouts import holds_shards, open_index
from loaders.loader import Loader
from loaders.targets import Target


def build_new_loader(
    cfg: Config,
    target: Target | None,
    in_channels: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[Loader, dict[str, str]]:
    """Build the loader of this rank's new samples in `data.root`, prepared as a validation split.

    With a model of one channel, photos become grey; `data.layout=cells` keeps the files' channels.

    Args:
        cfg: configuration of the run that trained the model, with another `data.root`.
        target: kind of targets that the model was trained on.
        in_channels: number of channels of the model's inputs, if they are images.
        device, rank, world_size: see `build_loaders()`.

    Returns:
        The loader, whose `bad` collects the samples that cannot be loaded, and reasons by path of
        images with bad headers, which are not among its samples.
    """
    cfg = copy.deepcopy(cfg)
    data, name = cfg.data, f"data.root={cfg.data.root}"
    data.on_error = "skip"  # bad files are part of the result
    data.leave_out = None  # it lists files of the training
    if data.layout == "own":
        return _own_loader(cfg, "new", target, device, rank, world_size), {}
    if cfg.loader.name == "synthetic":
        raise UserError(f"loader.name={cfg.loader.name} reads no files; use loader=pytorch")
    if not Path(data.root).is_dir():
        raise UserError(f"{name} is not a folder; set data.root to the folder of the images")
    others = Counter[str]()
    content = "stored" if data.layout == "cells" else "rgb"
    files = read_headers([images_below(Path(data.root), others, data.root)], data, [content])
    if content == "rgb" and in_channels == 1:
        files["headers-0"]["channels"] = 1
    index = file_index(name, data, files, Target("unknown"), describe_others(others))
    if index.inputs.channels != in_channels:
        raise UserError(
            f"{name} has images of {counted(index.inputs.channels, 'channel')}, but the model was "
            f"trained on {in_channels}; use images of the kind that it was trained on"
        )
    if cfg.loader.name == "dali":
        data.on_error = "raise"  # it cannot leave out a file once it has read it
    loader = image_loader(cfg, index, device, rank, world_size, train=False)
    loader.info.target, loader.info.description = target, index.notes
    return loader, index.left_out


def build_test_loader(
    cfg: Config, target: Target | None, device: torch.device, rank: int = 0, world_size: int = 1
) -> Loader:
    """Build the loader of this rank's test samples; see `build_new_loader()`."""
    data = cfg.data
    if data.layout == "own":
        return _own_loader(cfg, "test", target, device, rank, world_size)
    if holds_shards(data) or cfg.loader.name == "packed":
        raise UserError(
            f"split=test: loader.name={cfg.loader.name} data.root={data.root} has training and "
            "validation alone; read the files: loader=pytorch data.root=FOLDER"
        )
    index = open_index(data, ("train", "test")).get("test")
    if index is None:
        raise UserError(
            f"split=test: data={data.layout} data.root={data.root} has no test split, or it chose "
            "the best epoch, as there is no val; use split=val"
        )
    return image_loader(cfg, index, device, rank, world_size, train=False)


def _own_loader(
    cfg: Config, split: str, target: Target | None, device: torch.device, *ranks: int
) -> Loader:
    # Images need nothing of own data.
    loader: Loader = import_module("loaders.own_data").own_loader(cfg, split, device, *ranks)
    loader.info.target = target
    return loader
