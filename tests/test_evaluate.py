"""`evaluate()` adds up the sums of a task over a loader, and leaves the model as it was."""

from collections import UserList
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from loaders import DataInfo, Loader
from loaders.targets import Target
from runtime import evaluate
from tests.helpers import DEVICES
from tests.test_tasks import build, names, random

TASK = build("classification", Target("labels", names=names(7)))


def loader_of(*batches: tuple[Tensor, ...]) -> Loader:
    """A loader as far as evaluate() sees it: batches and an example."""
    loader: Any = UserList(batches)
    loader.info = DataInfo(example=torch.zeros(1, 3, 24, 32))
    return loader


class Probe(nn.Module):
    """Returns its inputs and records the modes of calls: training, gradients, dtype of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.scale = nn.Dropout(0.5), nn.Parameter(torch.ones(()))
        self.modes: list[tuple[bool, bool, torch.dtype | None]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        autocasts = torch.is_autocast_enabled(inputs.device.type)
        dtype = torch.get_autocast_dtype(inputs.device.type) if autocasts else None
        self.modes.append((self.child.training, torch.is_grad_enabled(), dtype))
        return self.child(inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("sizes", "num_batches", "calls", "dtype"),
    [((20, 20), 0, 2, torch.bfloat16), ((20, 20), 5, 5, None), ((), 2, 2, None)],
)
def test_it_calls_the_model_in_the_precision_and_as_often_as_it_is_asked_to(
    sizes: tuple[int, ...], num_batches: int, calls: int, dtype: Any, device: str
) -> None:
    """A rank without a batch, too, whose sums are zero."""
    model, outputs, targets = Probe().to(device), random(40, 7), torch.arange(40) % 7
    outputs, targets = outputs[: sum(sizes)].to(device), targets[: sum(sizes)].to(device)
    batches = zip(outputs.split(sizes), targets.split(sizes), strict=True)
    precision = torch.autocast(device, dtype, enabled=dtype is not None)
    totals, shown = evaluate(model, TASK, loader_of(*batches), precision, num_batches)
    assert model.modes == [(False, False, dtype)] * calls
    assert model.child.training  # as before
    assert (totals.device.type, totals.dtype) == (device, torch.float64)
    if not sizes:
        assert (totals.any(), shown) == (False, None)
        return
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
