"""Evaluation on one process; its sums can be added up over ranks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from loaders import Loader
from loaders.batch import map_leaves, num_samples, part
from tasks import Task

Shown = Sequence[tuple[Any, Any, Any]]
"""Inputs, outputs and targets of some samples, as batches of one."""

NUM_SHOWN = 16


def evaluate(
    model: nn.Module,
    task: Task,
    loader: Loader,
    precision: AbstractContextManager[object] | None = None,
    num_batches: int = 0,  # part: fsdp
) -> tuple[Tensor, Shown]:
    """Add up `task.sums()` over the loader, and keep some samples to show.

    A loader without batches gives zeros and no samples. The mode of the model is restored.

    Args:
        model: model, wrapped or not. The model inside DataParallel and DistributedDataParallel is
            called: the wrapper's collectives would wait for ranks that have fewer batches.
        task: task whose `sums()` are added up.
        loader: iterable of (inputs, targets).
        precision: context of the model and the sums, such as an autocast.
        num_batches: minimum number of calls of the model, equal on all ranks.  # part: fsdp

    Returns:
        Totals of shape (task.num_sums,), float64 on the model's device; and inputs, outputs and
        targets of up to 16 samples, evenly spaced: neighbours are often of one class.
    """
    if isinstance(model, DataParallel | DistributedDataParallel):  # part: dp|ddp
        model = model.module
    # Made outside inference mode: its tensors may not be changed later, as all_reduce does.
    device = next(model.parameters(), torch.empty(0)).device
    totals = torch.zeros(task.num_sums, dtype=torch.float64, device=device)
    shown: list[tuple[Any, Any, Any]] = []
    inputs: Any = None  # part: fsdp
    was_training = model.training
    model.eval()
    try:
        # Not inference mode, whose tensors FSDP cannot take.
        with torch.no_grad(), precision or nullcontext():
            for number, (inputs, targets) in enumerate(loader):
                outputs = model(inputs)
                totals += task.sums(outputs, targets)
                num_batches -= 1  # part: fsdp
                size = num_samples((inputs, targets))
                due = min((number + 1) * NUM_SHOWN // len(loader) - len(shown), size)
                for place in [size * n // due for n in range(due)]:
                    one = part((inputs, outputs, targets), place, place + 1)
                    shown.append(map_leaves(copied, one))
            if inputs is None and num_batches > 0:  # part: fsdp
                inputs = map_leaves(
                    lambda x: x.to(device) if isinstance(x, Tensor) else x, loader.info.example
                )
            for _ in range(num_batches):  # part: fsdp
                model(inputs)
    finally:
        model.train(was_training)
    return totals, shown


def copied(value: Any) -> Any:
    """Return a copy of a tensor, which does not keep the batch that it is a part of."""
    return value.clone() if isinstance(value, Tensor) else value
