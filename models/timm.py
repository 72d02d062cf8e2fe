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

    Raises:
        UserError: timm has no such architecture, or it does not take `kwargs`.
    """
    if "checkpoint_path" in kwargs:  # may be in the configuration of a stranger's run
        raise UserError(
            f"model.kwargs.checkpoint_path={kwargs['checkpoint_path']} is not read; set "
            "model.weights to that file"
        )
    if arch is None or not is_model(arch):
        raise unknown_name("model.arch", str(arch), list_models())
    try:
        model: Any = create_model(
            arch, pretrained=False, num_classes=num_outputs, in_chans=in_channels, **kwargs
        )
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"model.kwargs={kwargs} does not fit model.arch={arch}: {error}") from error
    head = model.get_classifier()
    layers = head if isinstance(head, tuple) else (head,)  # distilled models have two
    model.head_name = tuple(name for name, layer in model.named_modules() if layer in layers)
    return model


def imagenet_weights(cfg: ModelConfig, in_channels: int) -> dict[str, Tensor]:
    """Load timm's weights of `cfg.arch`, fitted to `cfg.kwargs` and to the channels; timm downloads
    them the first time.

    Raises:
        UserError: timm has no weights of this model, or they could not be downloaded.
    """
    try:
        model = create_model(cfg.arch, pretrained=True, in_chans=in_channels, **cfg.kwargs)
    except Exception as error:  # of the hub, its connection and its cache: of many types
        reason = str(error).partition("\n")[0] or repr(error)
        raise UserError(
            f"model.weights=imagenet: timm could not load model.arch={cfg.arch} ({reason}); start "
            "once with a network, copy the folder HF_HOME of a machine with one, or give a file"
        ) from error
    facts = model.pretrained_cfg
    log.info(
        "model.arch=%s was pretrained with data.mean=%s data.std=%s and images of %s",
        *(cfg.arch, list(facts["mean"]), list(facts["std"]), facts["input_size"]),
    )
    return model.state_dict()
