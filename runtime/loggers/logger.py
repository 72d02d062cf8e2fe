"""Interface of all loggers."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from conf.files import write_atomically

Settings = Mapping[str, float | str | bool]
Values = Mapping[str, float | Tensor]


class Logger:
    """Writes a run's values to one service, on rank 0 alone.

    Args:
        run_dir: folder of the run.
        settings: values that distinguish the run from others, by name.
        step: number of optimizer steps so far. After a resume, values of later steps are logged
            again; the logger hides or deletes those that an earlier process has logged.
    """

    def __init__(self, run_dir: Path, settings: Settings, step: int) -> None:
        raise NotImplementedError

    def log(self, values: Values, step: int) -> None:
        """Log values by name, such as `train/loss`, after `step` optimizer steps.

        A float is a number to plot, a tensor of shape (N, 1 or 3, H, W) in [0, 1] holds images.
        If it raises an error, the run warns and continues without the logger.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Write all values so far to disk; called before each checkpoint."""

    def close(self) -> None:
        """End the log; called at the end of the run."""


def kept_id(path: Path, create: Callable[[], str]) -> str:  # part: mlflow|wandb
    """Return the service's id of the run, which is kept in a file; of a new run, `create()`."""
    if path.exists() and (kept := path.read_text()):
        return kept
    created = create()
    with write_atomically(path) as temporary:
        temporary.write_text(created)
    return created
