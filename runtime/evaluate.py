"""Evaluation on one process, whose sums can be added up over ranks, and how far a run has come."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from loaders import Loader
from loaders.batch import map_leaves, part
from tasks import Task

Shown = tuple[Any, Any, Any]
"""Inputs, outputs and targets of some samples, as a batch."""

NUM_SHOWN = 16


def evaluate(
    model: nn.Module,
    task: Task,
    loader: Loader,
    precision: AbstractContextManager[object] | None = None,
    num_batches: int = 0,
) -> tuple[Tensor, Shown | None]:
    """Add up `task.sums()` over a loader, in the context `precision`, such as an autocast.

    Args:
        num_batches: minimum number of calls of the model, equal on all ranks.

    Returns:
        Totals of shape (task.num_sums,), float64 on the model's device; and inputs, outputs and
        targets of up to 16 samples of the first batch, None of a loader without batches.
    """
    # The wrapper's collectives would wait for ranks that have fewer batches.
    if isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    # Made outside inference mode: its tensors may not be changed later, as all_reduce does.
    device = next(model.parameters(), torch.empty(0)).device
    totals = torch.zeros(task.num_sums, dtype=torch.float64, device=device)
    shown: Shown | None = None
    inputs: Any = None
    was_training = model.training
    model.eval()
    # Not inference mode, whose tensors FSDP cannot take.
    with torch.no_grad(), precision or nullcontext():
        for inputs, targets in loader:
            outputs = model(inputs)
            totals += task.sums(outputs, targets)
            num_batches -= 1
            if shown is None:
                first = part((inputs, outputs, targets), 0, NUM_SHOWN)
                # Copies, which do not keep the whole batch in memory.
                shown = map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, first)
        if inputs is None and num_batches > 0:
            example = loader.info.example
            inputs = map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, example)
        for _ in range(num_batches):
            model(inputs)
    model.train(was_training)
    return totals, shown


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
