"""The promises of every model, and helpers that the tests of single models share."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conf.errors import UserError
from conf.schema import ModelConfig
from models import build_model


def build(name: str, in_channels: int, num_outputs: int, **kwargs: Any) -> Any:
    """The model, built as a script builds it."""
    return build_model(ModelConfig(name=name, kwargs=kwargs), in_channels, num_outputs)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_contract(name: str, num_outputs: int, shape: tuple[int, ...], *accepted: str) -> None:
    """Any number of channels; keyword arguments are checked; the memory format changes no result.

    Args:
        name: of the model.
        num_outputs: it is asked for.
        shape: (C, H, W) of an input; C is tried as 1, 3 and 5 where the model allows it.
        accepted: all its keyword arguments.
    """
    with pytest.raises(UserError, match=f"widht.*: {', '.join(accepted)}$"):
        build(name, shape[0], num_outputs, widht=8)
    with pytest.raises(UserError, match="num_outputs"):
        build_model(ModelConfig(name=name, kwargs={"num_outputs": 3}), shape[0], num_outputs)

    models = []
    for channels_last in (False, True):
        torch.manual_seed(0)
        cfg = ModelConfig(name=name, channels_last=channels_last)
        models.append(build_model(cfg, shape[0], num_outputs).eval())
        weights = [parameter for parameter in models[-1].parameters() if parameter.ndim == 4]
        formats = {w.is_contiguous(memory_format=torch.channels_last) for w in weights}
        assert (formats == {True}) == channels_last
    inputs = torch.rand(2, *shape)
    torch.testing.assert_close(models[1](inputs), models[0](inputs), rtol=1e-3, atol=1e-4)


def check_classifier(name: str, *accepted: str) -> None:
    check_contract(name, 7, (3, 64, 96), *accepted)
    with torch.device("meta"):  # shapes without the arithmetic
        for in_channels in (1, 3, 5):
            model = build(name, in_channels, 7)
            assert model(torch.empty(2, in_channels, 64, 96)).shape == (2, 7)


def fit(model: nn.Module, num_steps: int, loss_of_a_batch: Any, lr: float = 0.01) -> Tensor:
    """The loss of the last of so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of_a_batch()
        loss.backward()
        optimizer.step()
    return loss
