"""The models of timm, by the name of their architecture."""

import logging
from typing import Any

from timm import create_model, is_model, list_models
from torch import Tensor, nn

from conf.errors import UserError, unknown_name
from conf.schema import ModelConfig

log = logging.getLogger(__name__)


def timm(in_channels: int, num_outputs: int, arch: str | None = None, **kwargs: Any) -> nn.Module:
    """Build timm's model `arch` with new weights; its head is what timm's `get_classifier()`
    returns.

    Inputs: (N, in_channels, H, W); many transformers take one size only, set by `img_size=` in
    `kwargs`. Outputs: (N, num_outputs).
    """
    if arch is None or not is_model(arch):
        raise unknown_name("model.arch", str(arch), list_models())
    # May be in the configuration of a stranger's run, and runs what is in the file.
    if "checkpoint_path" in kwargs:
        raise UserError(
            f"model.kwargs.checkpoint_path={kwargs['checkpoint_path']} is not read; set "
            "model.weights to that file"
        )
    sizes = {"num_classes": num_outputs, "in_chans": in_channels, "pretrained": False}
    try:
        model: Any = create_model(arch, **sizes, **kwargs)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"model.kwargs={kwargs} does not fit model.arch={arch}: {error}") from error
    head = model.get_classifier()
    layers = head if isinstance(head, tuple) else (head,)  # distilled models have two
    model.head_name = tuple(name for name, layer in model.named_modules() if layer in layers)
    return model


def imagenet_weights(cfg: ModelConfig, in_channels: int) -> dict[str, Tensor]:
    """Load timm's weights of `cfg.arch`, fitted to `cfg.kwargs` and to the channels."""
    model = create_model(cfg.arch, pretrained=True, in_chans=in_channels, **cfg.kwargs)
    facts = model.pretrained_cfg
    log.info(
        "model.arch=%s was pretrained with data.mean=%s data.std=%s and images of %s",
        *(cfg.arch, list(facts["mean"]), list(facts["std"]), facts["input_size"]),
    )
    return model.state_dict()
