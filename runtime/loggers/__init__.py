"""Loggers of numbers and images, by name. Your own: a `MineLogger` in `mine.py` in this folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.files import write_atomically

Settings = Mapping[str, float | str | bool]
Values = Mapping[str, Any]


class Logger:
    """Writes a run's values to one service, on rank 0 alone."""

    def __init__(self, run_dir: Path, settings: Settings, step: int) -> None:
        """Begin or continue the log of the run in a folder, after `step` optimizer steps; values of
        later ones will be logged again: hide or delete those that an earlier process has logged.

        `settings` distinguish the run from others.
        """
        raise NotImplementedError

    def log(self, values: Values, step: int) -> None:
        """Log values by name, such as `train/loss`, after `step` optimizer steps.

        A float is a number to plot, a tensor of shape (N, 1 or 3, H, W) in [0, 1] holds images.
        Files are to be written at once: a log that ends before the checkpoint of a run that was
        killed has a gap. After an error, the run warns and continues without the logger.
        """
        raise NotImplementedError

    def close(self, is_finished: bool) -> None:
        """End the log: the run is finished, or else an error, a signal or `break` has ended it."""


def numbers_of(values: Values) -> dict[str, float]:
    """Return the values that are no images."""
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def kept_id(path: Path, create: Callable[[], str]) -> str:
    """Return the service's id of the run, which is kept in a file; of a new run, `create()`."""
    if path.exists() and (kept := path.read_text()):
        return kept
    created = create()
    with write_atomically(path) as temporary:
        temporary.write_text(created)
    return created
