"""The models by name, one file each. Your own: `models/tiny_net.py` with a class `TinyNet`.

A model is called with (in_channels, num_outputs, **kwargs), and with `arch` if `model.arch` is set,
and takes images. It returns `num_outputs` numbers for each image, or for each pixel.
"""

import inspect

import torch
from torch import nn

from conf.errors import UserError
from conf.names import find
from conf.schema import ModelConfig
from models.pretrained import freeze_as


def build_model(cfg: ModelConfig, in_channels: int, num_outputs: int) -> nn.Module:
    """Build `cfg.name` on the CPU with new weights; with `cfg.compile`, its first call compiles it.
    A UserError if the name is unknown, or the model does not take these sizes or kwargs."""
    new_model = find("models", cfg.name, "model.name")
    signature = inspect.signature(new_model)
    arguments: dict[str, object] = {"in_channels": in_channels, "num_outputs": num_outputs}
    if cfg.arch is not None:
        arguments["arch"] = cfg.arch
    try:
        given = signature.bind(**arguments, **cfg.kwargs)
    except TypeError as error:
        raise UserError(
            f"model.arch={cfg.arch} and model.kwargs={cfg.kwargs} do not fit model={cfg.name}: "
            f"{error}; it takes only {', '.join(signature.parameters)}"
        ) from error
    model = new_model(*given.args, **given.kwargs)
    freeze_as(cfg.freeze, model)
    if cfg.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if cfg.compile:
        model.compile()  # in place: the keys of checkpoints stay the same
    return model
