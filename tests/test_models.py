"""The door of the models: built by name, with errors that give the fix.

Each model of the template has a file of tests: `test_model_<name>.py`.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from conf.errors import UserError
from conf.schema import ModelConfig
from models import MODELS, build_model
from tests.helpers import REPOSITORY


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


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"model.name=own_modl .*did you mean own_model\?"):
        build_model(ModelConfig(name="own_modl"), 3, 10)


@pytest.mark.parametrize("kwarg", ["in_channels", "num_outputs", "baias"])
def test_kwargs_that_a_model_does_not_take_are_refused(kwarg: str) -> None:
    with pytest.raises(UserError, match=f"model.kwargs={{'{kwarg}'.*, bias$"):
        build_model(ModelConfig(name="own_model", kwargs={kwarg: 3}), 3, 10)


def test_a_function_may_take_any_kwargs(monkeypatch) -> None:
    def takes_any(in_channels: int, num_outputs: int, **kwargs: Any) -> nn.Module:
        return Own(in_channels, num_outputs, **kwargs)

    monkeypatch.setitem(MODELS, "takes_any", takes_any)
    cfg = ModelConfig(name="takes_any", kwargs={"bias": False})
    assert build_model(cfg, 3, 10).bias is None
    with pytest.raises(UserError, match="model.kwargs={'in_channels'"):
        build_model(ModelConfig(name="takes_any", kwargs={"in_channels": 3}), 3, 10)


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


def test_importing_the_models_imports_neither_torchvision_nor_timm() -> None:
    """Which takes seconds."""
    code = "import sys, models; assert not {'torchvision', 'timm'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
