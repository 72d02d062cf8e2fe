"""The classification models of torchvision, by the name of their architecture."""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from conf.errors import UserError, unknown_name
from conf.schema import ModelConfig
from models.pretrained import first_convolution


def torchvision(
    in_channels: int, num_outputs: int, arch: str | None = None, **kwargs: Any
) -> nn.Module:
    """Build torchvision's model `arch` with new weights; its first convolution is replaced when
    `in_channels` is not 3.

    Inputs: (N, in_channels, H, W); each architecture has its smallest H and W, some take one size
    only. Outputs: (N, num_outputs). The new convolution's weights have the spread of the old ones.
    """
    names = models.list_models(module=models)  # without those of segmentation, detection and video
    if arch not in names:
        raise unknown_name("model.arch", str(arch), names)
    if "weights" in kwargs:
        raise UserError(
            f"model.kwargs.weights={kwargs['weights']} is not read; set model.weights to imagenet "
            "or a file"
        )
    if arch in ("googlenet", "inception_v3"):  # no tuple in training, no warning of slow weights
        kwargs = {"aux_logits": False, "init_weights": True} | kwargs
    try:
        model: nn.Module = models.get_model(arch, num_classes=num_outputs, **kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f"model.kwargs={kwargs} does not fit model.arch={arch}: {error}") from error
    if in_channels != 3:
        name = first_convolution(model).removesuffix(".weight")
        old: Any = model.get_submodule(name)
        sizes = (old.out_channels, old.kernel_size, old.stride, old.padding)
        new = nn.Conv2d(in_channels, *sizes, bias=old.bias is not None)
        with torch.no_grad():
            new.weight.normal_().mul_(old.weight.std())
        model.set_submodule(name, new)
    return model


def imagenet_weights(cfg: ModelConfig, in_channels: int) -> dict[str, Tensor]:
    """Load torchvision's newest weights of its model `cfg.arch`."""
    weights = models.get_model_weights(str(cfg.arch)).DEFAULT
    return weights.get_state_dict(progress=False, check_hash=True)
