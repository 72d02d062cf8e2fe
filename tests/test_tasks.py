"""Tasks are chosen by name, for the data's targets.

Each task of the template has a file of tests: `test_task_<name>.py`.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conf.names import names_in
from loaders.targets import Labels, Target, TargetImages
from tasks import task_of
from tests.helpers import REPOSITORY, make_config, refused
from tests.task_contract import build, names, random

LABELS = Labels(np.zeros(0, np.int64), names(7))
NAMES = names_in("tasks")


@pytest.mark.parametrize("name", [name for name in NAMES if task_of(name).target_kind])
def test_targets_of_another_kind_are_refused_with_the_tasks_that_fit(name: str) -> None:
    other: Target = LABELS if task_of(name).target_kind != LABELS.kind else TargetImages()
    fitting = [task for task in NAMES if task_of(task).target_kind == other.kind]
    with refused(f"task={name}", other.kind, *fitting):
        build(name, "l1", other)


def test_the_loss_over_tokens_of_the_page_is_exact_for_any_parts_of_a_batch() -> None:
    """Of 4 samples with 1, 2, 3 and 20 tokens: a rank with the first two has few."""
    page = (REPOSITORY / "docs" / "tasks.md").read_text()
    defined: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], defined)
    task: Any = defined["Tokens"](make_config(), None)
    outputs, targets = random(4, 20, 256), torch.randint(256, (4, 20))
    lengths = torch.tensor([1, 2, 3, 20])
    targets[torch.arange(20) >= lengths[:, None]] = -100
    parts = [(outputs[:2], targets[:2]), (outputs[2:], targets[2:])]
    whole = task.loss(outputs, targets)
    torch.testing.assert_close(sum(task.loss(*part) for part in parts) / 2, whole)
    mean = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(whole, mean * 26 / (4 * task.tokens_per_sample))
    metrics = task.metrics(sum(task.sums(*part) for part in parts))
    assert metrics["loss"] == pytest.approx(mean.item(), rel=1e-6)
