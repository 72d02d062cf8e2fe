"""Loggers of numbers and images. Your own: one file with a `Logger`, and one line in `LOGGERS`."""

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from conf.errors import UserError, told, unknown_name
from runtime.loggers.logger import Logger, Settings, Values

log = logging.getLogger(__name__)

# name in `log.to` -> its class; a logger is imported only when it is used
LOGGERS = {
    "tensorboard": "runtime.loggers.tensorboard.TensorBoardLogger",
    "csv": "runtime.loggers.csv_file.CSVLogger",
    "wandb": "runtime.loggers.wandb_run.WandbLogger",
    "mlflow": "runtime.loggers.mlflow_run.MLflowLogger",
}


def logger_class(name: str) -> type[Logger]:
    """Return the class of a logger.

    Raises:
        UserError: there is no logger of this name, or its package is not installed.
    """
    if name not in LOGGERS:
        raise unknown_name("log.to", name, LOGGERS)
    module, _, class_name = LOGGERS[name].rpartition(".")
    try:
        return getattr(importlib.import_module(module), class_name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == module.partition(".")[0]:  # a file is missing, no package
            raise
        raise UserError(f"log.to={name} needs a package: pip install {package}") from error


class Loggers:
    """Loggers of a run. One that raises an error is left out until `open()`."""

    def __init__(self, names: Sequence[str], run_dir: Path) -> None:
        self.classes, self.run_dir = {name: logger_class(name) for name in names}, run_dir
        self.loggers: dict[str, Logger] = {}

    def open(self, settings: Settings, step: int) -> None:
        """Open loggers that are not open; arguments as for `Logger`."""
        for name, logger in self.classes.items():
            if name not in self.loggers:
                with self._leave_out(name):
                    self.loggers[name] = logger(self.run_dir, settings, step)

    def log(self, values: Values, step: int) -> None:
        self._call(lambda logger: logger.log(values, step))

    def flush(self) -> None:
        self._call(lambda logger: logger.flush())

    def close(self) -> None:
        self._call(lambda logger: logger.close())

    def _call(self, method: Callable[[Logger], None]) -> None:
        for name, logger in list(self.loggers.items()):
            with self._leave_out(name):
                method(logger)

    @contextmanager
    def _leave_out(self, name: str) -> Iterator[None]:
        """Leave out a logger that raises an error: the training goes on."""
        try:
            yield
        except Exception as error:  # a service's own type, or a bug
            log.warning("log.to=%s: values are lost until the next epoch: %s", name, told(error))
            self.loggers.pop(name, None)
