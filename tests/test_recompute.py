"""Recomputed activations need less memory and change no bit."""

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision import models

from runtime.recompute import recompute
from tests.faults import assert_same, assert_same_state
from tests.helpers import run_all, values_of

BATCH_NORM = ["model.kwargs.width=8"]
DROPOUT = ["model=timm", "model.arch=vit_tiny_patch16_224", "+model.kwargs.img_size=28"]
DROPOUT += [f"+model.kwargs.{key}" for key in ("patch_size=7", "embed_dim=24", "depth=3")]
DROPOUT += [f"+model.kwargs.{key}" for key in ("drop_rate=0.2", "proj_drop_rate=0.2")]
DROPOUT += ["+model.kwargs.drop_path_rate=0.2"]
SHORT = ["max_steps=5", "epochs=1", "log.every_steps=1", "log.images=0", "loader.num_workers=0"]


@pytest.mark.parametrize("model", [BATCH_NORM, DROPOUT], ids=["BatchNorm", "dropout"])
def test_a_run_computes_the_bits_of_the_baseline(model: list[str], tmp_path) -> None:
    scripts = ["train.py", "train_recompute.py"]
    run_all([[x, *model, *SHORT, f"output_dir={tmp_path / x}"] for x in scripts], tmp_path)
    assert_same_state(*(tmp_path / script for script in scripts))
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        one, other = (values_of(tmp_path / script, tag) for script in scripts)
        assert one == other


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
    num_calls = []
    last = [x for x in other.modules() if isinstance(x, nn.Conv2d)][-1]
    last.register_forward_pre_hook(lambda *_: num_calls.append(1))
    assert_same(computed(model), computed(other))
    other.eval()(torch.rand(2, 3, 32, 32)).sum().backward()
    with torch.no_grad():
        other.train()(torch.rand(2, 3, 32, 32))
    assert len(num_calls) == 2 * 2 + 2 + 1


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


@pytest.mark.parametrize(("arch", "kwargs"), [("resnet50", {}), ("vit_b_16", {"image_size": 64})])
def test_forward_keeps_less_than_a_third(arch: str, kwargs: dict[str, int]) -> None:
    with torch.device("meta"):
        model = models.get_model(arch, **kwargs)
    model, inputs = model.to_empty(device="cpu"), torch.zeros(2, 3, 64, 64)
    before = kept_by_forward(model, inputs)
    assert kept_by_forward(recompute(model), inputs) < before / 3


def test_a_model_without_blocks_is_named(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        recompute(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert "0 blocks" in caplog.text
