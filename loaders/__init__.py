"""Batches for training and evaluation, of any data.

train_loader, val_loader = build_loaders(cfg, device)
"""

from dataclasses import replace
from typing import Any

import torch

from conf.errors import UserError
from conf.schema import Config
from loaders.layouts import has_images, layout_of
from loaders.loader import DataInfo, Loader
from loaders.targets import Target


def build_loaders(
    cfg: Config, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Loader, Loader]:
    """Build the training and the validation loader of this rank; see `Loader` for what they yield.

    Args:
        cfg: `cfg.data`, `cfg.loader`, `cfg.global_batch_size` and `cfg.seed` are used.
        device: device of the batches.
        rank: global rank of this process.
        world_size: number of ranks.

    Raises:
        UserError: the data is missing, or a value of the configuration does not fit it.
        LimitError: the machine has run out of file handles; the message names a setting to change.
    """
    build: Any = getattr(layout_of(cfg.data), "build_loaders", None)
    if has_images(cfg.data):  # part: images
        from loaders.image_loaders import build_loaders as of_images  # own data need none of it

        build = of_images
    train_loader, val_loader = build(cfg, device, rank, world_size)
    num_val_samples = val_loader.info.num_samples
    train_loader.info = replace(train_loader.info, num_val_samples=num_val_samples)
    return train_loader, val_loader


# part: predict
def build_new_loader(
    cfg: Config,
    target: Target | None,
    in_channels: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[Loader, dict[str, str]]:
    """Build the loader of this rank's new samples in `data.root`, for `predict.py`.

    Args:
        cfg: configuration of the run that trained the model, with another `data.root`.
        target: kind of targets that the model was trained on.
        in_channels: number of channels of the model's inputs, if they are images.
        device, rank, world_size: see `build_loaders()`.

    Returns:
        The loader, and reasons by path of images with bad headers, which are not among its samples.
    """
    if has_images(cfg.data):  # part: images
        from loaders.prediction import build_prediction_loader

        return build_prediction_loader(cfg, target, in_channels, device, rank, world_size)
    build = getattr(layout_of(cfg.data), "build_new_loader", None)
    if build is None:
        raise UserError(f"data.layout={cfg.data.layout} has no new samples; use split=val")
    return build(cfg, target, device, rank, world_size), {}
