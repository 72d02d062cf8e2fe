"""Micro-batches: their number, and the exchange of gradients once per optimizer step."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runtime.run import Run
from tasks import Task


def micro_batches(run: Run, model: nn.Module, task: Task) -> int | Callable[[Any], int]:
    """Return the number of micro-batches per step; with `auto`, perhaps a function that finds it
    with the first batch. Every rank calls both."""
    if run.cfg.accumulate_steps != "auto":
        return run.cfg.accumulate_steps
    from runtime.fit import kept_or_found

    return kept_or_found(run, model, task)


def set_gradient_sync(model: nn.Module, syncs: bool) -> None:
    """Choose if the next backward exchanges gradients; to be called before forward.

    A model that is not wrapped in DDP or FSDP stays as it is.
    """
    set_sync: Any = getattr(model, "set_requires_gradient_sync", None)  # FSDP's
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif set_sync is not None:
        set_sync(syncs)
