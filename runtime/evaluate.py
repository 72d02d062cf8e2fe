"""Evaluation on one process: sums, not means, so that ranks can be added up."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from loaders import Loader
from tasks import Task

Shown = tuple[Tensor, ...]
"""Inputs, outputs and targets of some images, or nothing."""

NUM_SHOWN = 16


def evaluate(
    model: nn.Module,
    task: Task,
    loader: Loader,
    precision: AbstractContextManager[object] | None = None,
    num_batches: int = 0,
) -> tuple[Tensor, Shown]:
    """The totals of `task.sums()` over the loader, and some of its images to look at.

    A loader without batches gives zeros and no images. The model is in evaluation mode meanwhile and then
    in the mode that it was in.

    Args:
        model: bare or wrapped. Of DataParallel and DistributedDataParallel the model inside is called:
            the wrapper's collectives would wait for ranks that have fewer batches.
        task: its `sums()` are added up.
        loader: iterates (inputs, targets).
        precision: what the model and the sums are computed in, such as an autocast.
        num_batches: call the model at least so often, the last times for nothing: where ranks share its
            weights, all have to call it equally often.

    Returns:
        (task.num_sums,) float64 on the loader's device; and inputs, outputs and targets of up to 16
        images of the first batch.
    """
    if isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    # Made outside inference mode: its tensors may not be changed later, as all_reduce does.
    totals = torch.zeros(task.num_sums, dtype=torch.float64, device=loader.device)
    shown: Shown = ()
    inputs: Tensor | None = None
    was_training = model.training
    model.eval()
    try:
        # Not inference mode, whose tensors FSDP cannot take.
        with torch.no_grad(), precision or nullcontext():
            for inputs, targets in loader:
                outputs = model(inputs)
                totals += task.sums(outputs, targets)
                num_batches -= 1
                if not shown:  # copies, which do not keep the whole batch
                    shown = tuple(p[:NUM_SHOWN].clone() for p in (inputs, outputs, targets))
            if inputs is None and num_batches > 0:  # of a rank without a sample
                size = loader.in_channels, *loader.output_size
                inputs = torch.zeros(1, *size, device=loader.device)
            for _ in range(num_batches):
                model(inputs)
    finally:
        model.train(was_training)
    return totals, shown
