"""Optimizers of torch.optim by name, their groups of weights, and learning rates by step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from models import build_model
from runtime import build_optimizer
from tests.helpers import make_config, refused
from tests.rows import rows

STEPS_PER_EPOCH = 10


def rates(num_steps: int, *overrides: str) -> list[float]:
    """The learning rate of each step of two epochs."""
    cfg = make_config("epochs=2", "optimizer.lr=0.3", *overrides)
    optimizer, schedule = build_optimizer(cfg, nn.Linear(1, 1), STEPS_PER_EPOCH)
    found: list[float] = []
    for _ in range(num_steps):
        found += map(float, schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "step"])
def test_schedules_are_pytorchs_own(name: str, warmup_steps: int) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    after = {
        "cosine": lambda: schedulers.CosineAnnealingLR(other, 20 - warmup_steps),
        "linear": lambda: schedulers.LinearLR(other, 1.0, 0.0, 20 - warmup_steps),
        "constant": lambda: schedulers.ConstantLR(other, 1.0),
        # Epochs count from the beginning of the training.
        "step": lambda: schedulers.MultiStepLR(other, [10 - warmup_steps, 20 - warmup_steps]),
    }
    parts = [schedulers.LinearLR(other, 0.01, total_iters=5)] if warmup_steps else []
    expected = schedulers.SequentialLR(other, [*parts, after[name]()], [warmup_steps][: len(parts)])
    options = [f"optimizer.schedule={name}", f"optimizer.warmup_steps={warmup_steps}"]
    for step, rate in enumerate(rates(21, *options, "optimizer.step_epochs=1")):
        assert rate == pytest.approx(other.param_groups[0]["lr"], abs=1e-12), step
        other.step()
        expected.step()


def test_a_warmup_in_epochs_is_one_in_steps_and_ends_before_the_last_step() -> None:
    assert rates(20, "optimizer.warmup_epochs=0.5") == rates(20, "optimizer.warmup_steps=5")
    with refused("optimizer.warmup_steps=20 is not less than the 20 steps"):
        rates(20, "optimizer.warmup_steps=20")


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ("optimizer.name=RMSprop", "RMSprop", {}),
        *rows(("optimizer.name=Lion", "Lion", {}), needs="model=timm"),
        ("+optimizer.kwargs.betas=[0.8,0.9]", "AdamW", {"betas": (0.8, 0.9), "fused": True}),
        ("optimizer=sgd optimizer.kwargs.momentum=0.5", "SGD", {"momentum": 0.5, "nesterov": True}),
    ],
)
def test_any_class_of_torch_gets_its_arguments(options: str, name: str, expected) -> None:
    cfg = make_config("optimizer.weight_decay=0.25", *options.split())
    optimizer, _ = build_optimizer(cfg, nn.Linear(2, 2), STEPS_PER_EPOCH)
    assert type(optimizer).__name__ == name
    expected = {"weight_decay": 0.25, **expected}
    assert optimizer.defaults | expected == optimizer.defaults


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("optimizer.name=adamaxx", "did you mean adamax"),
        ("optimizer.name=lbfgs", "optimizer.name=lbfgs is unknown"),
        ("optimizer=sgd optimizer.kwargs.momentum=-1", "momentum': -1"),
        ("+optimizer.kwargs.momentum=1", "argument 'momentum'"),
        ("+optimizer.kwargs.lr=1", "multiple values"),
        ("optimizer.name=rprop", "optimizer.weight_decay=0.01"),
    ],
)
def test_what_a_class_does_not_take_is_refused(options: str, shown: str) -> None:
    with refused(shown):
        build_optimizer(make_config(*options.split()), nn.Linear(2, 2), STEPS_PER_EPOCH)


def groups_of(model: nn.Module, *overrides: str) -> dict[str, dict[str, Any]]:
    """The optimizer's group of each weight; of the first one, the rate is logged."""
    cfg = make_config("optimizer.lr=0.2", *overrides)
    optimizer, schedule = build_optimizer(cfg, model, STEPS_PER_EPOCH)
    assert schedule.get_last_lr()[0] == max(schedule.get_last_lr())
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    return {name: groups[p] for name, p in model.named_parameters()}


def test_norms_and_biases_can_do_without_weight_decay_and_a_backbone_has_its_own_rate() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    options = ["optimizer.weight_decay=0.5", "optimizer.decay_norms_and_biases=false"]
    for name, group in groups_of(model, *options, "optimizer.backbone_lr_scale=0.1").items():
        assert group["initial_lr"] == pytest.approx(0.2 if name.startswith("3.") else 0.02), name
        assert group["weight_decay"] == (0.5 if name in ("0.weight", "3.weight") else 0), name


VIT = {
    **{"class_token": 13, "conv_proj.weight": 13, "encoder.pos_embedding": 13},
    **{f"encoder.layers.encoder_layer_{n}.mlp.0.weight": 12 - n for n in range(12)},
    **{"encoder.ln.weight": 0, "heads.head.weight": 0},
}
TIMM = {"cls_token": 13, "blocks.0.attn.qkv.bias": 12, "blocks.11.attn.qkv.bias": 1}
TIMM |= {"norm.weight": 1, "head.weight": 0}  # as timm does
RESNET = {"conv1.weight": 12, "layer1.0.conv1.weight": 11, "layer3.5.bn3.weight": 4}
RESNET |= {"layer4.0.conv1.weight": 3, "layer4.2.conv1.weight": 1, "fc.weight": 0}


@pytest.mark.parametrize(
    ("overrides", "depths"),
    rows(
        (["model=torchvision", "model.arch=vit_b_16"], VIT),
        (["model=timm", "model.arch=vit_tiny_patch16_224"], TIMM),
        (["model=torchvision", "model.arch=resnet50"], RESNET),
        (["optimizer.name=muon"], {"features.0.0.weight": 4, "classifier.bias": 0}),
    ),
)
def test_the_rates_of_layers_fall_from_the_head_down(
    overrides: list[str], depths: dict[str, int]
) -> None:
    with torch.device("meta"):
        model = build_model(make_config(*overrides).model, 3, 10)
    groups = groups_of(model, "optimizer.layer_decay=0.5", *overrides)
    for name, depth in depths.items():
        assert groups[name]["initial_lr"] == pytest.approx(0.2 * 0.5**depth), name


def test_the_head_learns_alone_in_its_epochs_and_then_all_follow_the_schedule() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    cfg = make_config("epochs=2", "optimizer.lr=0.3", "optimizer.head_epochs=0.5")
    optimizer, schedule = build_optimizer(cfg, model, STEPS_PER_EPOCH)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for step, rate in enumerate(rates(20)):
        assert groups[model[0].weight]["lr"] == (0 if step < 5 else rate)
        assert groups[model[1].weight]["lr"] == rate
        optimizer.step()
        schedule.step()
