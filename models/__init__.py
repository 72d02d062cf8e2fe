"""The models by name. Your own: one file in this folder and one line in `MODELS`.

A classifier is called with (in_channels, num_classes, **kwargs) and returns logits; a restoration
net is called with (in_channels, **kwargs) and returns images.
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
from models.weights import freeze_backbone, start_from

if TYPE_CHECKING:
    from conf.schema import ModelConfig

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": SmallCNN,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "alexnet": alexnet,
    "nafnet": NAFNet,
}


def build_model(cfg: ModelConfig, in_channels: int, num_classes: int | None) -> nn.Module:
    """The model `cfg.name` on the CPU, in the memory format asked for, with fresh weights or with what
    fits of `cfg.weights`; with `cfg.freeze` its head alone learns.

    With `cfg.compile` it is compiled when it is first called. ``num_classes`` is None where the
    targets are images. Raises ValueError for an unknown name, a model that does not fit the targets,
    kwargs that the model does not take, and weights of which nothing fits.
    """
    if cfg.name not in MODELS:
        raise ValueError(f"model.name={cfg.name} is unknown; use one of: {', '.join(MODELS)}")

    if num_classes is None and is_classifier(cfg.name):
        others = [name for name in MODELS if not is_classifier(name)]
        raise ValueError(
            f"model={cfg.name} needs class labels, but the data has none; "
            f"use model={' or model='.join(others)}, or data with labels"
        )
    if num_classes is not None and not is_classifier(cfg.name):
        others = [name for name in MODELS if is_classifier(name)]
        raise ValueError(
            f"model={cfg.name} needs target images, but the data has labels of {num_classes} "
            f"classes; use model={' or model='.join(others)}, or data with pairs of images"
        )

    accepted = [name for name in parameters(cfg.name) if name not in ("in_channels", "num_classes")]
    unknown = [name for name in cfg.kwargs if name not in accepted]
    if unknown:
        raise ValueError(
            f"model.kwargs has {', '.join(unknown)}, which model={cfg.name} does not take; "
            f"use only: {', '.join(accepted) or 'none'}"
        )

    sizes = {"in_channels": in_channels}
    if num_classes is not None:
        sizes["num_classes"] = num_classes
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


def is_classifier(name: str) -> bool:
    """Whether the model predicts classes; a restoration net takes no `num_classes`."""
    return "num_classes" in parameters(name)


def parameters(name: str) -> list[str]:
    """Names of the arguments that the model is built with."""
    return list(inspect.signature(MODELS[name]).parameters)
