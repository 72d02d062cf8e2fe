"""What a run optimises and reports, by name. Your own: one file in this folder and one line in `TASKS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.classification import Classification
from tasks.restoration import Restoration

if TYPE_CHECKING:
    from conf.schema import Config

Task = Classification | Restoration


def build_task(cfg: Config, num_classes: int | None, classes: tuple[str, ...] = ()) -> Task:
    """The task `cfg.task.name`.

    Args:
        cfg: `cfg.task` and `cfg.data.value_range` are used.
        num_classes: of the labels; None where the targets are images.
        classes: their names; predictions say these.

    Raises:
        ValueError: an unknown task or loss, or targets of another kind than the task's.
    """
    if cfg.task.name == "classification":
        if num_classes is None:
            raise ValueError(
                "task=classification needs class labels, but the targets of this data are images; "
                "use task=restoration"
            )
        return Classification(num_classes, cfg.task.loss, cfg.task.label_smoothing, classes)
    if cfg.task.name == "restoration":
        if num_classes is not None:
            raise ValueError(
                f"task=restoration needs target images, but this data has labels of {num_classes} "
                "classes; use task=classification"
            )
        low, high = cfg.data.value_range
        return Restoration(cfg.task.loss, low, high)
    raise ValueError(f"task.name={cfg.task.name} is unknown; use classification or restoration")
