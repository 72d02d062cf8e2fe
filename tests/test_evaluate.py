"""`evaluate()` adds up the sums of a task over a loader, and leaves the model as it was."""

from collections import UserList
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loaders import DataInfo, Loader
from loaders.targets import Labels
from runtime import evaluate
from tests.helpers import DEVICES
from tests.task_contract import build, names, random

TASK = build("classification", "cross_entropy", Labels(np.zeros(0, np.int64), names(7)))


def loader_of(*batches: tuple[Tensor, ...]) -> Loader:
    """A loader as far as evaluate() sees it: batches and an example."""
    loader: Any = UserList(batches)
    loader.info = DataInfo(example=torch.zeros(1, 3, 24, 32))
    return loader


class Probe(nn.Module):
    """Returns its inputs and records the modes of calls: training, gradients, dtype of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Dropout(0.5)
        self.modes: list[tuple[bool, bool, torch.dtype | None]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        autocasts = torch.is_autocast_enabled(inputs.device.type)
        dtype = torch.get_autocast_dtype(inputs.device.type) if autocasts else None
        self.modes.append((self.child.training, torch.is_grad_enabled(), dtype))
        return self.child(inputs)


@pytest.mark.parametrize(
    ("asked", "calls", "dtype"),
    [
        ({"precision": torch.autocast("cpu", torch.bfloat16)}, 2, torch.bfloat16),
        ({"num_batches": 5}, 5, None),
    ],
)
def test_it_calls_the_model_in_the_precision_and_as_often_as_it_is_asked_to(
    asked: dict[str, Any], calls: int, dtype: torch.dtype | None
) -> None:
    model, outputs, targets = Probe(), random(40, 7), torch.arange(40) % 7
    batches = loader_of((outputs[:20], targets[:20]), (outputs[20:], targets[20:]))
    totals, shown = evaluate(model, TASK, batches, **asked)
    assert model.modes == [(False, False, dtype)] * calls
    assert model.child.training  # as before
    torch.testing.assert_close(totals, TASK.sums(outputs, targets), rtol=1e-6, atol=0)
    totals += 1  # as dist.all_reduce does; tensors made in inference mode refuse that
    assert shown is not None
    assert [len(values) for values in shown] == [16, 16, 16]
    assert torch.equal(shown[0], outputs[:16])
    assert shown[0].untyped_storage().nbytes() == shown[0].nbytes  # no view of the whole batch


def test_outputs_may_be_nested_and_no_batch_is_waited_for() -> None:
    """Tensors on the meta device have no values: looking at one fails."""
    model, task = nn.Linear(7, 7, device="meta"), Mock(num_sums=TASK.num_sums)
    model.register_forward_hook(lambda model, inputs, outputs: {"logits": outputs})
    task.sums = lambda outputs, targets: TASK.sums(outputs["logits"], targets)
    batch = torch.zeros(7, 7, device="meta"), torch.zeros(7, dtype=torch.long, device="meta")
    totals, shown = evaluate(model, task, loader_of(batch, batch))
    assert totals.is_meta
    assert shown is not None
    assert shown[1]["logits"].shape == (7, 7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_without_a_batch_gives_zeros_and_calls_the_model_as_often(device: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), Probe()).to(device)
    totals, shown = evaluate(model, TASK, loader_of(), num_batches=2)
    assert model[1].modes == [(False, False, None)] * 2
    assert (totals.device.type, totals.dtype) == (device, torch.float64)
    assert (totals.any(), shown) == (False, None)
