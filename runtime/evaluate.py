"""Evaluation on one process; its sums can be added up over ranks."""

from contextlib import AbstractContextManager, nullcontext
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
