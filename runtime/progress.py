"""How far a run has come."""

import logging
from dataclasses import dataclass, field
from typing import Any

from loaders import Loader
from tasks import Task

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come; its checkpoints hold these values by name in `run`."""

    num_epochs: int = 0
    """Epochs that have been trained to their end and validated."""

    validated_step: int = -1
    """Number of steps before the last validation."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last validation."""

    best_metric: str = ""
    """Metric that chooses the best checkpoint."""

    best_mode: str = "max"
    """`min`: a lower value of that metric is better."""

    micro_batches: dict[str, Any] = field(default_factory=dict)
    """Their `number` that `accumulate_steps=auto` has found, and the `place` that it is for."""

    epochs_without_best: int = 0
    """Validations since the best one, for early stopping; several with `validation.every_steps`."""

    def add(self, task: Task, metrics: dict[str, float], step_number: int, loader: Loader) -> None:
        """Record the metrics of a validation after a number of steps."""
        self.metrics, self.validated_step = metrics, step_number
        self.best_metric, self.best_mode = f"val/{task.best_metric}", task.best_mode
        self.num_epochs = loader.epoch + is_finished(loader)

    def count(self, is_better: bool) -> None:
        """Reset the count of validations without a better one, or add this one to it."""
        self.epochs_without_best = 0 if is_better else self.epochs_without_best + 1

    def has_stalled(self, patience: int | None) -> bool:
        """Return True after `patience` validations in a row without a better one."""
        if patience is None or self.epochs_without_best < patience:
            return False
        count = self.epochs_without_best
        log.info("early stopping: no better %s in %d validations", self.best_metric, count)
        return True

    def is_due(self, every_steps: int | None, step_number: int, loader: Loader) -> bool:
        """Return True if a validation within the epoch is due, `validation.every_steps`."""
        if every_steps is None or step_number % every_steps or is_finished(loader):
            return False
        return step_number not in (0, self.validated_step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values that a checkpoint holds; an older one may lack some."""
        for name in vars(self):
            setattr(self, name, state.get(name, getattr(self, name)))


def steps_done(loader: Loader) -> int:
    """Return the number of optimizer steps up to the position of the training loader."""
    return loader.epoch * len(loader) + loader.batches_done


def is_finished(loader: Loader) -> bool:
    """Return True if all batches of the epoch have been used."""
    return loader.batches_done >= len(loader)
