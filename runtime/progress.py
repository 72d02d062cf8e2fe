"""How far a run has come."""

from dataclasses import dataclass, field

from conf.schema import Config
from loaders import Loader
from tasks import Task


@dataclass
class Progress:
    """How far a run has come; its checkpoints hold these values by name."""

    num_epochs: int = 0  # trained to their end and validated
    validated_step: int = -1  # number of the step before the last validation
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation

    best_metric: str = ""  # the one that chooses the best checkpoint
    best_mode: str = "max"  # `min`: a lower value of it is better
    best_metrics: dict[str, float] = field(default_factory=dict)  # empty: no validation yet
    # Of the best validation, of tasks that have metrics of each class
    best_by_class: dict[str, dict[str, float | None]] = field(default_factory=dict)
    epochs_without_best: int = 0  # validations since the best one, for early stopping

    # Their number that `accumulate_steps=auto` has found, by the place that it is for
    micro_batches: dict[str, int] = field(default_factory=dict)

    def add(self, task: Task, metrics: dict[str, float], step_number: int, loader: Loader) -> bool:
        """Record a validation after a number of steps. True if it is the best so far: its value is
        better, or equal with a lower `val/loss`."""
        self.metrics, self.validated_step = metrics, step_number
        self.best_metric, self.best_mode = f"val/{task.best_metric}", task.best_mode
        self.num_epochs = loader.epoch + is_finished(loader)
        value, best = self._rank_of(metrics), self._rank_of(self.best_metrics)
        self.epochs_without_best = 0 if value[0] > best[0] else self.epochs_without_best + 1
        if value > best:
            self.best_metrics = metrics
        return value > best

    def _rank_of(self, metrics: dict[str, float]) -> tuple[float, float]:
        """Return a pair that is greater for better metrics."""
        if not metrics:
            return float("-inf"), float("-inf")
        value = metrics[self.best_metric]
        return -value if self.best_mode == "min" else value, -metrics.get("val/loss", 0.0)


def steps_done(loader: Loader) -> int:
    """Return the number of optimizer steps up to the position of the training loader."""
    return loader.epoch * len(loader) + loader.batches_done


def num_steps(cfg: Config, loader: Loader) -> int:
    """Return the number of optimizer steps of the whole run, unless it stops early."""
    steps = cfg.epochs * len(loader)
    return steps if cfg.max_steps is None else min(steps, cfg.max_steps)


def is_finished(loader: Loader) -> bool:
    """Return True if all batches of the epoch have been used."""
    return loader.batches_done >= len(loader)
