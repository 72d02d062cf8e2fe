"""Batches of new samples, for `predict.py`."""

import copy
from collections import Counter
from pathlib import Path

import torch

from conf.errors import UserError, counted
from conf.names import find
from conf.schema import Config
from loaders.backends import image_loader
from loaders.file_index import file_index, read_headers
from loaders.folders import describe_others, images_below
from loaders.loader import Loader
from loaders.targets import Target


def build_new_loader(
    cfg: Config,
    target: Target | None,
    in_channels: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Build the loader of this rank's new samples in `data.root`, prepared as a validation split.

    With a model of one channel, photos become grey; `data.layout=cells` keeps the files' channels.

    Args:
        cfg: configuration of the run that trained the model, with another `data.root`.
        target: kind of targets that the model was trained on.
        in_channels: number of channels of the model's inputs, if they are images.
        device, rank, world_size: see `build_loaders()`.
    """
    cfg = copy.deepcopy(cfg)
    data, name = cfg.data, f"data.root={cfg.data.root}"
    data.on_error = "skip"  # bad files are part of the result
    data.leave_out = None  # it lists files of the training
    if data.layout == "own":
        own_loader = find("loaders.layouts", "own", "data.layout")
        loader: Loader = own_loader(cfg, "new", device, rank, world_size)
        loader.info.target = target
        return loader
    if cfg.loader.name == "synthetic":
        raise UserError(f"loader.name={cfg.loader.name} reads no files; use loader=pytorch")
    if not Path(data.root).is_dir():
        raise UserError(f"{name} is not a folder; set data.root to the folder of the images")
    others = Counter[str]()
    content = "stored" if data.layout == "cells" else "rgb"
    paths = images_below(Path(data.root), others, data.root)
    files = read_headers([paths], data, [content], describe_others(others))
    if content == "rgb" and in_channels == 1:
        files["headers-0"]["channels"] = 1
    index = file_index(name, data, files, Target("unknown"))
    if index.inputs.channels != in_channels:
        raise UserError(
            f"{name} has images of {counted(index.inputs.channels, 'channel')}, but the model was "
            f"trained on {in_channels}; use images of the kind that it was trained on"
        )
    if cfg.loader.name == "dali":
        data.on_error = "raise"  # it cannot leave out a file once it has read it
    loader = image_loader(cfg, index, device, rank, world_size, train=False)
    loader.info.target, loader.info.description = target, index.notes
    return loader
