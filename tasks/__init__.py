"""The tasks by name, one file each: losses, metrics and predictions.

Your own: `tasks/my_task.py` with a class `MyTask`, a subclass of `Task`, which lists its attributes
and methods.
"""

from operator import attrgetter

from conf.errors import UserError, unknown_name
from conf.names import find, names_in
from conf.schema import Config, TaskConfig
from loaders import Loader
from tasks.common import Task


def task_of(name: str) -> type[Task]:
    """Import the class of a task.

    Raises:
        UserError: there is no task of this name.
    """
    return find("tasks", name, "task.name")


def build_task(cfg: Config, loader: Loader) -> Task:
    """Build the task `cfg.task.name` for the data of the training loader.

    Raises:
        UserError: the task or its loss is unknown, or it is not for such targets or keys.
    """
    name, target = cfg.task.name, loader.info.target
    kind = target.kind if target else "not described"
    task_class = task_of(name)
    needed = task_class.target_kind
    if needed not in ("", kind):
        hint = " (data.label_kind)" if cfg.data.layout == "table" else ""
        fitting = [other for other in names_in("tasks") if task_of(other).target_kind == kind]
        raise UserError(
            f"task={name} is for {needed}, but the targets of data={cfg.data.layout} are {kind}; "
            f"use data with {needed}{hint}, or a task for {kind}: "
            f"{', '.join(fitting) or 'none exists'} "
            "(task=NAME, or task.name=NAME without a file in conf/task)"
        )
    if task_class.losses and cfg.task.loss not in task_class.losses:
        raise unknown_name("task.loss", cfg.task.loss, task_class.losses)
    for key in task_class.refused_keys:
        value, default = map(attrgetter(key), (cfg, Config(task=TaskConfig())))
        if value != default:
            raise UserError(f"{key}={value} has no meaning for task={name}; leave it out")
    return task_class(cfg, loader)
