"""Muon trains matrices and convolutions, AdamW all other weights."""

import torch
from torch import Tensor, nn

from runtime.training import build_optimizer
from tests.faults import assert_same
from tests.helpers import checkpoint_of, make_config, run_all

BY_ADAMW = {"embedding.weight", "position", "1.bias", "2.weight", "2.bias", "4.weight", "4.bias"}


class Net(nn.Sequential):
    def __init__(self) -> None:
        layers = [nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8)]
        super().__init__(*layers, nn.Linear(8, 8, bias=False), nn.Linear(8, 5))
        self.embedding = nn.Embedding(7, 8)
        self.position = nn.Parameter(torch.ones(7, 8))
        self.head_name = "4"


def test_each_weight_is_trained_by_its_own() -> None:
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = ["optimizer.name=muon", "optimizer.weight_decay=0", "optimizer.schedule=constant"]
    cfg = make_config(*options, "optimizer.warmup_epochs=0", "optimizer.lr=0.01")
    optimizer, schedule = build_optimizer(cfg, model, 10)
    assert set(schedule.get_last_lr()) == {0.01}
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()

    def update(name: str) -> Tensor:
        return (before[name] - model.get_parameter(name).detach()) / 0.01

    for name in gradients:
        if name in BY_ADAMW:  # the first step of Adam has the size of the rate
            expected = gradients[name].sign()
            torch.testing.assert_close(update(name), expected, rtol=1e-2, atol=1e-2)
        else:
            matrix = update(name).flatten(1)
            values = torch.linalg.svdvals(matrix) / (0.2 * max(matrix.shape) ** 0.5)
            assert 0.5 < values.min() <= values.max() < 1.5, name


def test_a_resumed_run_has_the_same_bits(tmp_path) -> None:
    options = ["train.py", "optimizer.name=muon", "optimizer.layer_decay=0.8", "epochs=1"]
    options += ["model.kwargs.width=8", "log.images=0", "resume=auto"]
    places = ("whole", 6), ("parts", 3), ("parts", 6)
    more = [[f"output_dir={tmp_path / name}", f"max_steps={n}"] for name, n in places]
    run_all([[*options, *each] for each in more], tmp_path)
    one, other = (checkpoint_of(tmp_path / name) for name in ("whole", "parts"))
    assert_same(one["model"], other["model"])
    assert_same(one["optimizer"]["state"], other["optimizer"]["state"])
    assert {x["use_muon"] for x in one["optimizer"]["state"].values()} == {False, True}
