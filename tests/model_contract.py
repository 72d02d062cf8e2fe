"""The promises of every model, and helpers that the tests of single models share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.schema import ModelConfig
from models import build_model
from models.pretrained import first_convolution, head_of
from tests.helpers import refused


def build(
    name: str, in_channels: int, num_outputs: int, arch: str | None = None, **kwargs: Any
) -> Any:
    """The model, built as a script builds it."""
    return build_model(ModelConfig(name=name, arch=arch, kwargs=kwargs), in_channels, num_outputs)


def check_contract(name: str, head: str, accepted: str, *wrong: tuple[str, Any]) -> None:
    """The layer that is replaced for other outputs, keyword arguments and wrong values are as
    given; the memory format changes no result."""
    with refused("widht", f"it takes only in_channels, num_outputs, {accepted}"):
        build(name, 3, 3, widht=8)
    for key, value in wrong:
        with refused(f"{key}={value}"):
            build(name, 3, 3, **{key: value})

    models = []
    for channels_last in (False, True):
        torch.manual_seed(0)
        cfg = ModelConfig(name=name, channels_last=channels_last)
        models.append(build_model(cfg, 3, 3).eval())
    first = first_convolution(models[1])
    assert models[1].get_parameter(first).is_contiguous(memory_format=torch.channels_last)
    inputs = torch.rand(2, 3, 16, 24)
    torch.testing.assert_close(models[1](inputs), models[0](inputs), rtol=1e-3, atol=1e-4)
    assert head_of(models[0]) == (head,)


def check_learning(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """The loss of a batch falls to a fifth, and most of each parameter has a part in it."""
    loss_of = F.mse_loss if targets.is_floating_point() else F.cross_entropy
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5
    for name, parameter in model.named_parameters():
        assert (parameter != before[name]).float().mean() > 0.6, name
