"""How far a run has come."""

from dataclasses import dataclass, field

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

    def add(self, task: Task, metrics: dict[str, float], step_number: int, num_epochs: int) -> bool:
        """Record a validation after so many steps and whole epochs. True if it is the best so far:
        its value is better, or equal with a lower `val/loss`."""
        self.metrics, self.validated_step = metrics, step_number
        self.best_metric, self.best_mode = f"val/{task.best_metric}", task.best_mode
        self.num_epochs = num_epochs
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
