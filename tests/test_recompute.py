"""Recomputed activations need less memory and change no bit."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision import models

from runtime.recompute import recompute
from tests.processes import train
from tests.results import assert_same, assert_same_state, values_of
from tests.rows import rows

SHORT = ["model.kwargs.width=8", "max_steps=4", "accumulate_steps=2", "log.every_steps=1"]


MERGED = rows("train_ddp.py", "train_amp_ema_fsdp.py", needs="tools.compose")
SLOW = [pytest.param(script, marks=pytest.mark.slow) for script in MERGED]


@pytest.mark.parametrize("script", ["train.py", *SLOW])
def test_a_run_computes_the_bits_of_the_one_without(script: str, tmp_path) -> None:
    runs = []
    for name in (script, script.replace(".py", "_recompute.py")):
        runs.append(tmp_path / name)
        train(name, runs[-1], *SHORT)
    assert_same_state(*runs)
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        assert values_of(runs[0], tag) == values_of(runs[1], tag)


class Turned(nn.Module):
    """Layer whose buffer changes in each forward, which depends on it."""

    angle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angle", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.angle += 0.1
        return inputs * self.angle.cos()


def turned() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3), Turned(), nn.Dropout()) for _ in range(3)]
    return nn.Sequential(*blocks)


# A block of the second model takes a list that grows; one of the third changes its inputs in place.
MODELS = [turned, models.densenet121, models.efficientnet_b0]


def computed(model: nn.Module) -> tuple[list[Tensor | None], dict[str, Tensor], Tensor]:
    """Gradients, weights and buffers, and random numbers after two steps."""
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.rand(2, 3, 32, 32)).square().mean().backward()
    return [p.grad for p in model.parameters()], model.state_dict(), torch.rand(2)


@pytest.mark.parametrize("new_model", MODELS)
def test_buffers_change_once_and_names_stay(new_model) -> None:
    torch.manual_seed(0)
    model = new_model().train()
    other = recompute(copy.deepcopy(model))
    assert [*other.state_dict()] == [*model.state_dict()]
    assert type(other) is type(model)
    last = [x for x in other.modules() if isinstance(x, nn.Conv2d)][-1]
    last.register_forward_pre_hook(calls := Mock(return_value=None))
    assert_same(computed(model), computed(other))
    assert calls.call_count == 2 * 2
    with torch.no_grad():
        other(torch.rand(2, 3, 32, 32))
    assert calls.call_count == 2 * 2 + 1


def kept_by_forward(model: nn.Module, inputs: Tensor) -> int:
    """Bytes that forward keeps for backward, besides the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(inputs)
    assert outputs.requires_grad
    return sum(size for place, size in sizes.items() if place not in weights)


def test_forward_keeps_less_than_a_third() -> None:
    with torch.device("meta"):
        model = models.resnet50()
    model, inputs = model.to_empty(device="cpu"), torch.zeros(2, 3, 64, 64)
    before = kept_by_forward(model, inputs)
    assert kept_by_forward(recompute(model), inputs) < before / 3
