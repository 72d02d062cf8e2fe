"""A small CNN: any size from eight pixels, with and without BatchNorm; how models are built."""

from unittest.mock import Mock

import pytest
import torch

from conf.schema import ModelConfig
from models import build_model
from tests.helpers import refused
from tests.model_contract import build, check_contract, check_learning


def test_it_keeps_the_contract() -> None:
    wrong = [("width", width) for width in (0, 7, -2)]  # it needs a half
    check_contract("small_cnn", "classifier", "width, batch_norm", *wrong)


def test_what_a_model_is_not_called_with_is_refused() -> None:
    with refused("model.arch=resnet18", "it takes only in_channels, num_outputs, width"):
        build("small_cnn", 3, 10, arch="resnet18")
    with refused("model.kwargs={'in_channels': 3}"):
        build_model(ModelConfig(name="small_cnn", kwargs={"in_channels": 3}), 3, 10)


def test_a_model_is_compiled_if_asked_for(monkeypatch) -> None:
    compiled = Mock(side_effect=lambda call: call)
    monkeypatch.setattr(torch, "compile", compiled)
    for asked in (False, True):
        model = build_model(ModelConfig(name="small_cnn", compile=asked), 3, 10)
        assert model(torch.rand(2, 3, 8, 8)).shape == (2, 10)
        assert compiled.call_count == asked


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 8, 31), (3, 28, 28), (5, 50, 50)])
def test_it_takes_any_size_from_eight_pixels(shape: tuple[int, ...]) -> None:
    assert build("small_cnn", shape[0], 10)(torch.rand(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_it_learns_with_and_without_batch_norm(batch_norm: bool) -> None:
    torch.manual_seed(0)
    model = build("small_cnn", 1, 10, width=8, batch_norm=batch_norm)
    has_any = any("BatchNorm" in type(module).__name__ for module in model.modules())
    assert has_any == batch_norm
    check_learning(model, torch.rand(8, 1, 16, 16), torch.arange(8))
