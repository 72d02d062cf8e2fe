"""What a run optimises and reports, by name.

Your own: one file in this folder with a class like those, and one line in `TASKS`. `tasks/task.py` says
what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.classification import Classification
from tasks.multilabel import MultiLabel
from tasks.regression import Regression
from tasks.restoration import Restoration
from tasks.segmentation import Segmentation
from tasks.task import Task

if TYPE_CHECKING:
    from conf.schema import Config
    from loaders import Loader

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "multilabel": MultiLabel,
    "regression": Regression,
    "restoration": Restoration,
    "segmentation": Segmentation,
}


def build_task(cfg: Config, loader: Loader) -> Task:
    """The task `cfg.task.name` for the data of the training loader.

    Raises:
        ValueError: an unknown task or loss, or targets of another kind than the task's.
    """
    name = cfg.task.name
    if name not in TASKS:
        raise ValueError(f"task.name={name} is unknown; use one of {', '.join(TASKS)}")
    takes, kind = TASKS[name].takes, loader.target.kind
    if takes != kind:
        fitting = [f"task={other}" for other, task in TASKS.items() if task.takes == kind]
        raise ValueError(
            f"task={name} takes {takes}, but the targets of data={cfg.data.layout} are {kind}; use "
            + (" or ".join(fitting) or f"data with {takes}")
        )
    return TASKS[name].from_config(cfg, loader)


__all__ = [
    "TASKS",
    "Classification",
    "MultiLabel",
    "Regression",
    "Restoration",
    "Segmentation",
    "Task",
    "build_task",
]
