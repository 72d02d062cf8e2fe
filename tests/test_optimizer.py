"""Optimizers of torch.optim by name, their groups of weights, and learning rates by step."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from conf.errors import UserError
from runtime.training import build_optimizer
from tests.helpers import make_config

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


def test_a_warmup_in_epochs_is_one_in_steps_up_to_the_last_step() -> None:
    assert rates(20, "optimizer.warmup_epochs=0.5") == rates(20, "optimizer.warmup_steps=5")
    for warmup in ("optimizer.warmup_epochs=1.96", "optimizer.warmup_steps=19"):
        found = rates(20, warmup)
        assert found[:19] == sorted(found[:19])
    with pytest.raises(UserError, match="optimizer.warmup_steps=20 is not less than the 20 steps"):
        rates(20, "optimizer.warmup_steps=20")


@pytest.mark.parametrize("name", ["adafactor", "adamw", "RMSprop", "sgd"])
def test_any_class_of_torch_gets_its_arguments(name: str) -> None:
    options = [f"optimizer.name={name}", "optimizer.weight_decay=0.25"]
    optimizer, _ = build_optimizer(make_config(*options), nn.Linear(2, 2), STEPS_PER_EPOCH)
    assert type(optimizer).__name__.lower() == name.lower()
    assert optimizer.defaults["weight_decay"] == 0.25


def test_arguments_of_ones_own_are_passed_on() -> None:
    options = ["optimizer=sgd", "optimizer.kwargs.momentum=0.5"]
    optimizer, _ = build_optimizer(make_config(*options), nn.Linear(2, 2), STEPS_PER_EPOCH)
    assert optimizer.defaults | {"momentum": 0.5, "nesterov": True} == optimizer.defaults
    cfg = make_config("+optimizer.kwargs.betas=[0.8,0.9]")
    optimizer, _ = build_optimizer(cfg, nn.Linear(2, 2), STEPS_PER_EPOCH)
    assert tuple(optimizer.defaults["betas"]) == (0.8, 0.9)
    assert optimizer.defaults["fused"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("optimizer.name=adamx", "optimizer.name=adamx .*did you mean adamax"),
        ("optimizer.name=lbfgs", "optimizer.name=lbfgs is unknown"),
        ("optimizer=sgd optimizer.kwargs.momentum=-1", "momentum': -1"),
        ("+optimizer.kwargs.momentum=1", "optimizer.name=adamw .* argument 'momentum'"),
        ("+optimizer.kwargs.lr=1", "optimizer.kwargs={'lr': 1}: .*multiple values"),
        ("optimizer.name=rprop", "optimizer.weight_decay=0.01"),
        ("optimizer.name=muon +optimizer.kwargs.algo=sgd", "optimizer.name=muon .*Invalid algo"),
    ],
)
def test_what_a_class_does_not_take_is_refused(options: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_optimizer(make_config(*options.split()), nn.Linear(2, 2), STEPS_PER_EPOCH)


@pytest.mark.parametrize("scale", [1, 0.1])
def test_norms_and_biases_can_do_without_weight_decay_and_a_backbone_has_its_own_rate(
    scale: float,
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))
    options = ["optimizer.weight_decay=0.5", "optimizer.decay_norms_and_biases=false"]
    options += ["optimizer.lr=0.2", f"optimizer.backbone_lr_scale={scale}"]
    optimizer, _ = build_optimizer(make_config(*options), model, STEPS_PER_EPOCH)
    found = {
        id(p): (group["initial_lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        rate, decay = found[id(parameter)]
        assert rate == pytest.approx(0.2 if name.startswith("3.") else 0.2 * scale), name
        assert decay == (0.5 if name in ("0.weight", "3.weight") else 0), name
    assert optimizer.param_groups[0]["initial_lr"] == 0.2  # which is logged
