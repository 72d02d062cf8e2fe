"""The door of the models: built by name, with errors that give the fix.

Each model of the template has a file of tests: `test_model_<name>.py`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from conf.errors import UserError
from conf.schema import ModelConfig
from models import MODELS, build_model


class Own(nn.Linear):
    """A user's own."""

    def __init__(self, in_channels: int, num_outputs: int, bias: bool = True) -> None:
        super().__init__(in_channels, num_outputs, bias)


@pytest.fixture(autouse=True)
def own_model(monkeypatch) -> None:
    monkeypatch.setitem(MODELS, "own_model", Own)


def test_an_own_model_is_a_class_and_a_line() -> None:
    model = build_model(ModelConfig(name="own_model", kwargs={"bias": False}), 3, 10)
    assert isinstance(model, Own)
    assert model.bias is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "own_modl"}, r"model.name=own_modl .*did you mean own_model\?"),
        ({"arch": "resnet18"}, "model.arch=resnet18"),
        ({"kwargs": {"in_channels": 3}}, "model.kwargs={'in_channels'.*, bias$"),
        ({"kwargs": {"num_outputs": 3}}, "model.kwargs={'num_outputs'.*, bias$"),
        ({"kwargs": {"baias": 3}}, "model.kwargs={'baias'.*, bias$"),
    ],
)
def test_what_a_model_does_not_take_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model(replace(ModelConfig(name="own_model"), **wrong), 3, 10)


def test_a_model_is_compiled_if_asked_for(monkeypatch) -> None:
    compiled: list[Any] = []

    def note(call: Any, **options: Any) -> Any:
        compiled.append(call)
        return call

    monkeypatch.setattr(torch, "compile", note)
    for asked in (False, True):
        model = build_model(ModelConfig(name="own_model", compile=asked), 3, 10)
        assert model(torch.rand(2, 3)).shape == (2, 10)
        assert len(compiled) == asked
        assert model.state_dict().keys() == {"weight", "bias"}
