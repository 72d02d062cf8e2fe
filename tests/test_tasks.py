"""Tasks are chosen by name, for the data's targets; an own one is a class and a line.

Each task of the template has a file of tests: `test_task_<name>.py`.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import Config
from loaders import Loader
from loaders.targets import Labels, Target, TargetImages
from tasks import TASKS, Task, build_task
from tests.task_contract import check_contract, config, data_with, names, random


class Ordinal(Task):
    """A user's own: how far the predicted class is from the true one."""

    target_kind = "labels"
    best_metric = "closeness"
    metric_names = ("loss", "closeness")

    def __init__(self, cfg: Config, loader: Loader) -> None:
        self.num_outputs, self.num_sums = len(loader.info.classes), 3

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        distances = self.loss_per_image(outputs, targets).double()
        columns = torch.ones_like(distances), distances, (distances < 2).double()
        return torch.stack(columns).sum(dim=1)

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != (len(targets), self.num_outputs):
            raise ValueError(f"outputs have shape {outputs.shape}")
        return (outputs.argmax(dim=1) - targets).abs().float()


LABELS = Labels(np.zeros(0, np.int64), names(7))


def test_an_own_task_is_a_class_and_a_line(monkeypatch) -> None:
    monkeypatch.setitem(TASKS, "ordinal", Ordinal)
    task = build_task(config("ordinal", "distance"), data_with(LABELS))
    assert task.num_outputs == 7
    check_contract(task, random(12, 7), torch.arange(12) % 7)
    with pytest.raises(UserError, match=r"task.name=ordinl .*ordinal\?"):  # the nearest name
        build_task(config("ordinl", "distance"), data_with(LABELS))


@pytest.mark.parametrize("name", [*TASKS, "ordinal"])
def test_targets_of_another_kind_are_refused_with_the_tasks_that_fit(
    name: str, monkeypatch
) -> None:
    monkeypatch.setitem(TASKS, "ordinal", Ordinal)
    images: Target = TargetImages()
    other = LABELS if TASKS[name].target_kind != LABELS.kind else images
    with pytest.raises(UserError) as error:
        build_task(config(name, "l1"), data_with(other))
    message = str(error.value)
    assert f"task={name}" in message
    fitting = [task for task in TASKS if TASKS[task].target_kind == other.kind]
    assert all(task in message for task in (other.kind, *fitting))
