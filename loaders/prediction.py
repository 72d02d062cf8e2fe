"""Batches of images without labels, for `predict.py`."""

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from conf.errors import UserError
from conf.schema import Config, DataConfig
from loaders.backends import ImageLoader, backend
from loaders.index import Index, file_index, images_below, read_headers
from loaders.limits import limits_explained
from loaders.plan import PlanSampler
from loaders.targets import Target, Unlabelled


def build_prediction_loader(
    cfg: Config,
    target: Target | None,
    channels: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[ImageLoader, dict[str, str]]:
    """Build the loader of this rank's images of the folder `data.root`, prepared as those of a
    validation split.

    Args:
        cfg: configuration of the run that trained the model, with another `data.root`.
        target: kind of targets that the model was trained on.
        channels: number of channels of the model's inputs.
        device, rank, world_size: see `build_loaders()`.

    Returns:
        The loader, whose `sampler.bad` collects the files that cannot be decoded, and the files
        with bad headers, which are not in its index: reasons by path.

    Raises:
        UserError: there are no images, or they do not fit the model.
    """
    if cfg.loader.name == "synthetic":
        raise UserError(
            f"loader.name={cfg.loader.name} reads no files; use loader=pytorch or loader=dali"
        )
    cfg = copy.deepcopy(cfg)
    cfg.data.on_error = "skip"  # bad files are part of the result
    with limits_explained():
        index = _unlabelled_index(cfg.data, channels)
    index, broken = replace(index, left_out={}), index.left_out
    cfg.data.max_bad_samples = len(index)
    if cfg.loader.num_workers == "auto":  # part: tune
        cfg.loader.num_workers = None  # measuring may take longer than loading
    sampler = PlanSampler(index, cfg, rank, world_size, train=False)
    loader = backend(cfg.loader.name)(sampler, cfg, device)
    loader.info = replace(loader.info, target=target, description=index.notes)
    return loader, broken


def _unlabelled_index(data: DataConfig, channels: int) -> Index:
    """Build the index of the images below `data.root`, for a model whose inputs have `channels`.

    With one channel, photos become grey; `data.layout=cells` keeps the channels of the files.

    Raises:
        UserError: `data.root` is not a folder or has no image, or the images have other channels
            than the model takes.
    """
    root = Path(data.root)
    if not root.is_dir():
        raise UserError(
            f"data.root={root} is not a folder; set data.root to the folder of the images"
        )
    keep_channels = data.layout == "cells"
    others: Counter[str] = Counter()
    paths = images_below(root, others)
    files = read_headers(paths, data, "stored" if keep_channels else "rgb", others)
    if not keep_channels and channels == 1:
        files.headers["channels"] = 1
    index = file_index(f"data.root={root}", data.root, (files,), Unlabelled(), keep_channels)
    if index.channels != channels:
        raise UserError(
            f"the images of {index.name} have {index.channels} channels, but the model was "
            f"trained on {channels}; use images of the kind that it was trained on"
        )
    return index
