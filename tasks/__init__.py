"""The tasks by name: losses, metrics and predictions.

Your own: one file in this folder with a subclass of `Task`, and one line in `TASKS`.
`tasks/task.py` lists its attributes and methods.
"""

from operator import attrgetter

from conf.errors import UserError, unknown_name
from conf.schema import Config, TaskConfig
from loaders import Loader
from tasks.classification import Classification
from tasks.multilabel import MultiLabel
from tasks.regression import Regression
from tasks.restoration import Restoration
from tasks.segmentation import Segmentation
from tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "multilabel": MultiLabel,
    "regression": Regression,
    "restoration": Restoration,
    "segmentation": Segmentation,
}


def build_task(cfg: Config, loader: Loader) -> Task:
    """Build the task `cfg.task.name` for the data of the training loader.

    Raises:
        UserError: the task or its loss is unknown, or it is not for such targets or keys.
    """
    name, target = cfg.task.name, loader.info.target
    kind = target.kind if target else "not described"
    if name not in TASKS:
        raise unknown_name("task.name", name, TASKS)
    needed = TASKS[name].target_kind
    if needed not in ("", kind):
        hint = " (data.label_kind)" if cfg.data.layout == "table" else ""
        fitting = [other for other, task in TASKS.items() if task.target_kind == kind]
        raise UserError(
            f"task={name} is for {needed}, but the targets of data={cfg.data.layout} are {kind}; "
            f"use data with {needed}{hint}, or a task for {kind}: "
            f"{', '.join(fitting) or 'none exists'} "
            "(task=NAME, or task.name=NAME without a file in conf/task)"
        )
    if TASKS[name].losses and cfg.task.loss not in TASKS[name].losses:
        raise unknown_name("task.loss", cfg.task.loss, TASKS[name].losses)
    for key in TASKS[name].refused_keys:
        value, default = map(attrgetter(key), (cfg, Config(task=TaskConfig())))
        if value != default:
            raise UserError(f"{key}={value} has no meaning for task={name}; leave it out")
    return TASKS[name](cfg, loader)
