"""The tasks by name, one file each: losses, metrics and predictions.

Your own: `tasks/my_task.py` with a class `MyTask`, a subclass of `Task`.
"""

from conf.errors import UserError, unknown_name
from conf.names import find
from conf.schema import Config
from loaders import Loader
from tasks.common import Task


def build_task(cfg: Config, loader: Loader) -> Task:
    """Build the task `cfg.task.name` for the data of the training loader.

    Raises:
        UserError: the task or its loss is unknown, or it is not for such targets.
    """
    name, target = cfg.task.name, loader.info.target
    task_class: type[Task] = find("tasks", name, "task.name")
    kind = target.kind if target else "not described"
    if task_class.target_kind not in ("", kind):
        raise UserError(
            f"task={name} is for {task_class.target_kind}, but the targets of "
            f"data={cfg.data.layout} are {kind}; use a task for {kind}, or other data "
            "(of a table: data.label_kind)"
        )
    if task_class.losses and cfg.task.loss not in task_class.losses:
        raise unknown_name("task.loss", cfg.task.loss, task_class.losses)
    return task_class(cfg, loader)
