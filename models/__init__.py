"""The models by name. Your own: one file in this folder and one line in `MODELS`.

A model is called with (in_channels, num_outputs, **kwargs), and with `arch` if `model.arch` is set,
and takes images. It returns `num_outputs` numbers for each image, or for each pixel.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from conf.errors import UserError, unknown_name
from conf.schema import ModelConfig
from models.finetune import freeze_as
from models.nafnet import NAFNet
from models.small_cnn import SmallCNN
from models.timm_models import timm_model
from models.torchvision_models import torchvision_model
from models.unet import UNet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": SmallCNN,
    "nafnet": NAFNet,
    "unet": UNet,
    "torchvision": torchvision_model,
    "timm": timm_model,
}


def build_model(cfg: ModelConfig, in_channels: int, num_outputs: int) -> nn.Module:
    """Build `cfg.name` on the CPU with new weights; with `cfg.compile`, its first call compiles it.

    Args:
        cfg: the group `model` of the configuration.
        in_channels: number of channels of the images.
        num_outputs: number of outputs that the task needs.

    Raises:
        UserError: the name is unknown, or the model does not take these sizes or kwargs.
    """
    if cfg.name not in MODELS:
        raise unknown_name("model.name", cfg.name, MODELS)

    given: dict[str, Any] = {
        "in_channels": in_channels,
        "num_outputs": num_outputs,
        "arch": cfg.arch,
    }
    parameters = inspect.signature(MODELS[cfg.name]).parameters
    accepted = [name for name in parameters if name not in given]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in cfg.kwargs if name in given or not (takes_any or name in accepted)]
    if unknown:
        raise UserError(
            f"model.kwargs has {', '.join(unknown)}, which model={cfg.name} does not take; "
            f"use only: {', '.join(accepted) or 'none'}"
        )
    if cfg.arch is None:
        del given["arch"]
    elif "arch" not in parameters:
        raise UserError(
            f"model.arch={cfg.arch}: model={cfg.name} is one architecture; leave model.arch out"
        )

    model = MODELS[cfg.name](**given, **cfg.kwargs)

    freeze_as(cfg, model)  # part: finetune

    if cfg.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if cfg.compile:
        model.compile()  # in place: the keys of checkpoints stay the same
    return model
