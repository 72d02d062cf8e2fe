"""Micro-batches: their number, and the exchange of gradients once per optimizer step."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loaders.batch import num_samples, part
from runtime.run import Run
from tasks import Task


class MicroBatches:
    """Parts of a batch, of equal size, which pass through the model one after another.

    Attributes:
        number: parts of a batch; 0 until `accumulate_steps=auto` has found it.
        is_last: whether the part that was yielded last ends its batch, and so a step.
    """

    def __init__(self, run: Run, model: nn.Module, task: Task) -> None:
        """Take the number that is configured or that a checkpoint holds for `auto`, unless it is
        for other devices, batches or another script; every rank calls it."""
        self.run, self.model, self.task = run, model, task
        self.number, self.is_last = 0, True
        self.place: dict[str, Any] = {}
        if run.cfg.accumulate_steps != "auto":
            self.number = run.cfg.accumulate_steps
            return
        on_gpu = run.device.type == "cuda"
        name = torch.cuda.get_device_name(run.device) if on_gpu else run.device.type
        self.place = {"devices": run.group.gather(name), "script": Path(sys.argv[0]).name}
        self.place["global_batch_size"] = run.cfg.global_batch_size
        kept = run.progress.micro_batches
        if kept.get("place") == self.place:
            self.number = kept["number"]

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the parts of batches; every rank finds a number that is not known yet."""
        for batch in batches:
            if self.number == 0:
                from runtime.fit import find  # of which a given number needs nothing

                self.number = find(self.run, self.model, self.task, self.place, batch)
            if self.number == 1:  # whole, also if its values have no common first dimension
                yield batch
                continue
            size = num_samples(batch) // self.number  # a divisor, see check_batch_size()
            for place in range(self.number):
                self.is_last = place == self.number - 1
                yield part(batch, place * size, (place + 1) * size)


def set_gradient_sync(model: nn.Module, syncs: bool) -> None:
    """Choose if the next backward exchanges gradients; to be called before forward.

    A model that is not wrapped in DDP or FSDP stays as it is.
    """
    set_sync: Any = getattr(model, "set_requires_gradient_sync", None)  # FSDP's
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif set_sync is not None:
        set_sync(syncs)
