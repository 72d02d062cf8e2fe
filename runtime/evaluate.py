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

Kept = list[Tensor]
"""Losses, inputs, outputs and targets of some samples."""


def evaluate(
    model: nn.Module,
    task: Task,
    loader: Loader,
    precision: AbstractContextManager[object] | None = None,
    num_batches: int = 0,
) -> tuple[Tensor, Shown]:
    """Add up `task.sums()` over the (inputs, targets) of a loader, and keep the worst samples.

    A loader without batches gives zeros and no samples. The mode of the model is restored.

    Args:
        model: model, wrapped or not. The model inside DataParallel and DistributedDataParallel is
            called: the wrapper's collectives would wait for ranks that have fewer batches.
        precision: context of the model and the sums, such as an autocast.
        num_batches: minimum number of calls of the model, equal on all ranks.

    Returns:
        Totals of shape (task.num_sums,), float64 on the model's device; and inputs, outputs and
        targets of up to 16 samples with the highest losses, the highest first. If these are not
        tensors, samples are evenly spaced: neighbours are often of one class.
    """
    if isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    # Made outside inference mode: its tensors may not be changed later, as all_reduce does.
    device = next(model.parameters(), torch.empty(0)).device
    totals = torch.zeros(task.num_sums, dtype=torch.float64, device=device)
    shown: list[tuple[Any, Any, Any]] = []
    kept: Kept = []
    inputs: Any = None
    was_training = model.training
    model.eval()
    # Not inference mode, whose tensors FSDP cannot take.
    with torch.no_grad(), precision or nullcontext():
        for number, (inputs, targets) in enumerate(loader):
            outputs = model(inputs)
            totals += task.sums(outputs, targets)
            num_batches -= 1
            if all(isinstance(value, Tensor) for value in (inputs, outputs, targets)):
                losses = task.loss_per_image(outputs, targets)
                kept = with_worst(kept, [losses, inputs, outputs, targets])
                continue
            size = num_samples((inputs, targets))
            due = min((number + 1) * NUM_SHOWN // len(loader) - len(shown), size)
            for place in [size * n // due for n in range(due)]:
                one = part((inputs, outputs, targets), place, place + 1)
                # Copies, which do not keep the whole batch in memory.
                shown.append(map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, one))
        if inputs is None and num_batches > 0:
            example = loader.info.example
            inputs = map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, example)
        for _ in range(num_batches):
            model(inputs)
    model.train(was_training)
    num_kept = len(kept[0]) if kept else 0
    worst = [part(tuple(kept[1:]), n, n + 1) for n in range(num_kept)]
    return totals, worst or shown


def with_worst(kept: Kept, batch: Kept) -> Kept:
    """Return the samples with the highest losses of two sets, without waiting for the device; those
    kept alone if the batch has other shapes, as texts of other lengths."""
    batch = worst_of(batch)
    if not kept:
        return batch
    if [values.shape[1:] for values in kept] != [values.shape[1:] for values in batch]:
        return kept
    return worst_of([torch.cat(pair) for pair in zip(kept, batch, strict=True)])


def worst_of(samples: Kept) -> Kept:
    """Return the samples with the highest losses, the highest first."""
    order = samples[0].topk(min(NUM_SHOWN, len(samples[0]))).indices
    return [values[order] for values in samples]
