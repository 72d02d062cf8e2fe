"""The models of timm, by the name of their architecture."""

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from conf.errors import UserError, unknown_name

if TYPE_CHECKING:
    from conf.schema import ModelConfig

log = logging.getLogger(__name__)


def timm_model(
    in_channels: int, num_outputs: int, arch: str | None = None, **kwargs: Any
) -> nn.Module:
    """Build timm's model `arch` with new weights; its head is what timm's `get_classifier()`
    returns.

    Inputs: (N, in_channels, H, W); many transformers take one size only, set by `img_size=` in
    `kwargs`. Outputs: (N, num_outputs).

    Raises:
        UserError: timm is not installed, has no such architecture, or it does not take `kwargs`.
    """
    timm = import_timm()
    if arch is None or not timm.is_model(arch):
        raise unknown_name("model.arch", str(arch), timm.list_models())
    try:
        model: Any = timm.create_model(
            arch, pretrained=False, num_classes=num_outputs, in_chans=in_channels, **kwargs
        )
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise UserError(f"model.kwargs={kwargs} does not fit model.arch={arch}: {error}") from error
    head = model.get_classifier()
    layers = head if isinstance(head, tuple) else (head,)  # distilled models have two
    model.head_name = tuple(name for name, layer in model.named_modules() if layer in layers)
    return model


def timm_weights(cfg: "ModelConfig", in_channels: int) -> dict[str, Tensor]:
    """Load timm's weights of `cfg.arch`, fitted to `cfg.kwargs` and to the channels; timm downloads
    them the first time.

    Raises:
        UserError: timm has no weights of this model, or they could not be downloaded.
    """
    timm = import_timm()
    try:
        model = timm.create_model(cfg.arch, pretrained=True, in_chans=in_channels, **cfg.kwargs)
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


def import_timm() -> Any:
    """Import timm when it is used: it takes seconds, and few projects have it."""
    try:
        import timm
    except ModuleNotFoundError as error:
        raise UserError("model=timm needs timm: pip install timm") from error
    return timm
