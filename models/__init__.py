"""The models by name. Your own: one file in this folder and one line in `MODELS`.

A model is called with (in_channels, num_outputs, **kwargs) and takes images. It returns `num_outputs`
numbers for each image, or for each pixel, as the task needs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from models.alexnet import alexnet
from models.nafnet import NAFNet
from models.resnet import resnet18, resnet50
from models.small_cnn import SmallCNN
from models.unet import UNet
from models.weights import freeze_backbone, start_from

if TYPE_CHECKING:
    from conf.schema import ModelConfig

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": SmallCNN,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "alexnet": alexnet,
    "nafnet": NAFNet,
    "unet": UNet,
}


def build_model(cfg: ModelConfig, in_channels: int, num_outputs: int) -> nn.Module:
    """The model `cfg.name` on the CPU, in the memory format asked for, with fresh weights or with what
    fits of `cfg.weights`; with `cfg.freeze` its head alone learns.

    With `cfg.compile` it is compiled when it is first called. ``num_outputs`` is the task's. Raises
    ValueError for an unknown name, sizes that the model cannot have, kwargs that it does not take, and
    weights of which nothing fits.
    """
    if cfg.name not in MODELS:
        raise ValueError(f"model.name={cfg.name} is unknown; use one of: {', '.join(MODELS)}")

    sizes = {"in_channels": in_channels, "num_outputs": num_outputs}
    accepted = [
        name for name in inspect.signature(MODELS[cfg.name]).parameters if name not in sizes
    ]
    unknown = [name for name in cfg.kwargs if name not in accepted]
    if unknown:
        raise ValueError(
            f"model.kwargs has {', '.join(unknown)}, which model={cfg.name} does not take; "
            f"use only: {', '.join(accepted) or 'none'}"
        )

    model = MODELS[cfg.name](**sizes, **cfg.kwargs)

    if cfg.freeze not in (None, "backbone"):
        raise ValueError(f"model.freeze={cfg.freeze} is unknown; use backbone or null")
    start_from(model, cfg)
    if cfg.freeze == "backbone":
        freeze_backbone(model)

    if cfg.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if cfg.compile:
        model.compile()  # in place, so that checkpoints stay the same
    return model
