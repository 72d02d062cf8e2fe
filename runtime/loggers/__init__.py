"""Loggers of numbers and images, by name. Your own: a `MineLogger` in `mine.py` in this folder."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.errors import told
from conf.files import write_atomically
from conf.names import find

log = logging.getLogger(__name__)

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

    def close(self) -> None:
        """End the log; called at the end of the run."""


class Loggers:
    """Loggers of a run, by name. One that raises an error is left out from then on: training goes
    on."""

    def __init__(self, names: Sequence[str], run_dir: Path) -> None:
        self.classes: dict[str, type[Logger]] = {
            name: find("runtime.loggers", name, "log.to", "{}Logger") for name in names
        }
        self.run_dir, self.loggers = run_dir, dict[str, Logger]()
        self.settings: Settings | None = None

    def open(self, settings: Settings, step: int) -> None:
        """Let loggers begin with the next value: a run that fails before its first one has no log.
        Without this call, as on all ranks but 0, nothing is logged."""
        self.settings, self.step = settings, step

    def log(self, values: Values, step: int) -> None:
        if self.settings is None:
            return
        for name, new in [*self.classes.items()]:
            with self._left_out_on_error(name):
                if name not in self.loggers:
                    self.loggers[name] = new(self.run_dir, self.settings, self.step)
                self.loggers[name].log(values, step)

    def close(self) -> None:
        for name, logger in [*self.loggers.items()]:
            with self._left_out_on_error(name):
                logger.close()

    @contextmanager
    def _left_out_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a service's own type, or a bug
            log.warning("log.to=%s: values are lost from here on: %s", name, told(error))
            self.loggers.pop(name, None)
            self.classes.pop(name)


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
