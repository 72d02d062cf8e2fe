"""Evaluation on one process: sums, not means, so that ranks can be added up."""

import torch
from torch import Tensor, nn

from loaders import Loader
from runtime.tasks import Task


def evaluate(
    model: nn.Module, task: Task, loader: Loader, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Totals [images, *sums of task.metric_names] over the loader, float64, on its device.

    A wrapped model is evaluated without its wrapper, because ranks can have unequal numbers of
    batches and the wrapper's collectives would then wait for ever. A loader without batches gives
    zeros. The model is in evaluation mode meanwhile and then in the mode that it was in.

    Args:
        model: the model, bare or wrapped.
        task: its `sums()` are added up.
        loader: iterates (inputs, targets).
        dtype: autocast's low precision; float32 is no autocast.
    """
    bare = getattr(model, "module", model)
    # Made outside inference mode: its tensors may not be changed later, as all_reduce does.
    totals = torch.zeros(len(task.metric_names) + 1, dtype=torch.float64, device=loader.device)
    was_training = bare.training
    bare.eval()
    low_precision = torch.autocast(loader.device.type, dtype, enabled=dtype != torch.float32)
    try:
        with torch.inference_mode(), low_precision:
            for inputs, targets in loader:
                totals += task.sums(bare(inputs), targets)
    finally:
        bare.train(was_training)
    return totals
