"""Batches of samples that training has not seen, for `predict.py`: new ones and the test split."""

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from conf.credentials import without_credentials
from conf.errors import UserError, counted
from conf.names import file_of
from conf.schema import Config, DataConfig
from loaders.backends import ImageLoader, backend
from loaders.common import limits_explained
from loaders.epoch import Loader
from loaders.index import Index, file_index, holds_shards, images_below, open_index, read_headers
from loaders.layouts import has_images, layout_of
from loaders.plan import PlanSampler
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
        The loader, whose `sampler.bad` collects the samples that cannot be loaded, and reasons by
        path of images with bad headers, which are not among its samples.

    Raises:
        UserError: there are no samples, or they do not fit the model.
    """
    if not has_images(cfg.data):
        build = getattr(layout_of(cfg.data), "build_new_loader", None)
        if build is None:
            raise UserError(f"data.layout={cfg.data.layout} has no new samples; use split=val")
        return build(cfg, target, device, rank, world_size), {}
    if cfg.loader.name == "synthetic":
        raise UserError(f"loader.name={cfg.loader.name} reads no files; use loader=pytorch")
    cfg = copy.deepcopy(cfg)
    cfg.data.on_error = "skip"  # bad files are part of the result
    with limits_explained():
        index = _unlabelled_index(cfg.data, in_channels)
    index, broken = replace(index, left_out={}), index.left_out
    cfg.data.max_bad_samples = len(index)
    loader = _image_loader(index, cfg, device, rank, world_size)
    loader.info = replace(loader.info, target=target, description=index.notes)
    return loader, broken


def build_test_loader(
    cfg: Config, target: Target | None, device: torch.device, rank: int = 0, world_size: int = 1
) -> Loader:
    """Build the loader of this rank's test samples; see `build_new_loader()`.

    Raises:
        UserError: the data has no test split, or is not read from its files.
    """
    data = cfg.data
    if not has_images(data):
        build = getattr(layout_of(data), "build_test_loader", None)
        if build is None:
            raise UserError(f"split=test: data.layout={data.layout} has none; use split=val")
        loader: Loader = build(cfg, target, device, rank, world_size)
        return loader
    reader = file_of("loaders.backends", cfg.loader.name, "loader.name")
    if holds_shards(data) or hasattr(reader, "open_indexes"):
        raise UserError(
            f"split=test: loader.name={cfg.loader.name} data.root={without_credentials(data.root)} "
            "has training and validation alone; read the files: loader=pytorch data.root=FOLDER"
        )
    with limits_explained():
        index = open_index(data, ("train", "test")).get("test")
    if index is None:
        raise UserError(
            f"split=test: data={data.layout} data.root={data.root} has no test split, or it chose "
            "the best epoch, as there is no val; use split=val (docs/splits.md)"
        )
    return _image_loader(index, copy.deepcopy(cfg), device, rank, world_size)


def _image_loader(
    index: Index, cfg: Config, device: torch.device, rank: int, world_size: int
) -> ImageLoader:
    """Build the loader of an index; may change `cfg`."""
    if cfg.loader.num_workers == "auto":
        cfg.loader.num_workers = None  # measuring may take longer than loading
    sampler = PlanSampler(index, cfg, rank, world_size, train=False)
    return backend(cfg.loader.name)(sampler, cfg, device)


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
    if index.channels != channels:
        raise UserError(
            f"{name} has images of {counted(index.channels, 'channel')}, but the model was trained "
            f"on {channels}; use images of the kind that it was trained on"
        )
    return index
