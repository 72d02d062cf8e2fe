"""Micro-batches: their number, and the exchange of gradients once per optimizer step."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runtime.run import Run
from tasks import Task


def micro_batches(run: Run, model: nn.Module, task: Task) -> int | Callable[[Any], int]:
    """Return the number of micro-batches per step, which a checkpoint may hold for `auto`; for
    other devices, batches or scripts, a function that finds it with the first batch. Every rank
    calls both."""
    if run.cfg.accumulate_steps != "auto":
        return run.cfg.accumulate_steps
    from runtime.fit import find  # of which a given number needs nothing

    on_gpu = run.device.type == "cuda"
    name = torch.cuda.get_device_name(run.device) if on_gpu else run.device.type
    place: dict[str, Any] = {"devices": run.group.gather(name), "script": Path(sys.argv[0]).name}
    place["global_batch_size"] = run.cfg.global_batch_size
    kept = run.progress.micro_batches
    return kept["number"] if kept.get("place") == place else partial(find, run, model, task, place)


def set_gradient_sync(model: nn.Module, syncs: bool) -> None:
    """Choose if the next backward exchanges gradients; to be called before forward.

    A model that is not wrapped in DDP or FSDP stays as it is.
    """
    set_sync: Any = getattr(model, "set_requires_gradient_sync", None)  # FSDP's
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif set_sync is not None:
        set_sync(syncs)
