"""Tasks are chosen by name, for the data's targets.

Each task of the template has a file of tests: `test_task_<name>.py`.
"""

import numpy as np
import pytest

from loaders.targets import Labels, Target, TargetImages
from tasks import TASKS
from tests.helpers import refused
from tests.task_contract import build, names

LABELS = Labels(np.zeros(0, np.int64), names(7))


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with refused("task.name=clasification ", "classification?"):
        build("clasification", "cross_entropy", LABELS)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.target_kind])
def test_targets_of_another_kind_are_refused_with_the_tasks_that_fit(name: str) -> None:
    other: Target = LABELS if TASKS[name].target_kind != LABELS.kind else TargetImages()
    fitting = [task for task in TASKS if TASKS[task].target_kind == other.kind]
    with refused(f"task={name}", other.kind, *fitting):
        build(name, "l1", other)
