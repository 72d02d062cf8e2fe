"""The door of the models: built by name, with errors that give the fix.

Each model of the template has a file of tests: `test_model_<name>.py`.
"""

from unittest.mock import Mock

import torch

from conf.schema import ModelConfig
from models import build_model
from tests.helpers import refused
from tests.model_contract import build


def test_names_and_sizes_that_are_not_of_a_model_are_refused() -> None:
    with refused("model.name=smal_cnn ", "did you mean small_cnn?"):
        build("smal_cnn", 3, 10)
    with refused("model.arch=resnet18", "it takes only in_channels, num_outputs, width"):
        build("small_cnn", 3, 10, arch="resnet18")
    cfg = ModelConfig(name="small_cnn", kwargs={"in_channels": 3})
    with refused("model.kwargs={'in_channels': 3}"):
        build_model(cfg, 3, 10)


def test_a_model_is_compiled_if_asked_for(monkeypatch) -> None:
    """And keeps the names of its weights, as test_entry_points.py shows."""
    compiled = Mock(side_effect=lambda call: call)
    monkeypatch.setattr(torch, "compile", compiled)
    for asked in (False, True):
        model = build_model(ModelConfig(name="small_cnn", compile=asked), 3, 10)
        assert model(torch.rand(2, 3, 8, 8)).shape == (2, 10)
        assert compiled.call_count == asked
