"""Micro-batches: their number, and the exchange of gradients once per optimizer step."""

import gc
import logging
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conf.errors import MEMORY, ONE_SAMPLE, UserError, cause_of, counted
from loaders.batch import num_samples, part, tensors_of
from runtime.run import Run
from runtime.shards import is_sharded
from tasks import Task

log = logging.getLogger(__name__)

OPTIMIZER_STATE = 2
"""Size of an optimizer's state in sizes of the trained weights, at most: that of AdamW."""


class MicroBatches:
    """Parts of a batch, of equal size, which pass through the model one after another.

    Attributes:
        number: parts of a batch; 0 until `accumulate_steps=auto` has found it.
        is_last: whether the part that was yielded last ends its batch, and so a step.
    """

    def __init__(self, run: Run, model: nn.Module, task: Task) -> None:
        """Take the number that is configured or that a checkpoint holds for `auto`, unless it is
        for other devices, batches or another script; every rank calls it.

        Raises:
            UserError: `auto` with FSDP, whose ranks compute together and cannot try alone.
        """
        self.run, self.model, self.task = run, model, task
        self.number, self.is_last = 0, True
        self.place: dict[str, Any] = {}
        if run.cfg.accumulate_steps != "auto":
            self.number = run.cfg.accumulate_steps
            return
        if any(map(is_sharded, model.parameters())):
            raise UserError(
                "accumulate_steps=auto does not work with FSDP; give a number, such as 4"
            )
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
                self.number = self.find(batch)
            if self.number == 1:  # whole, also if its values have no common first dimension
                yield batch
                continue
            size = num_samples(batch) // self.number  # a divisor, see check_batch_size()
            for place in range(self.number):
                self.is_last = place == self.number - 1
                yield part(batch, place * size, (place + 1) * size)

    def find(self, batch: Any) -> int:
        """Return the smallest number of parts that fit into the memory of every rank.

        Raises:
            UserError: not even the smallest parts fit.
        """
        run = self.run
        batch_size, margin = run.cfg.global_batch_size, run.cfg.accumulate_margin
        share = batch_size // run.group.world_size
        for number in range(1, share + 1):
            if share % number:
                continue
            fits = run.group.gather(self.fits(part(batch, 0, share // number)))
            if all(fits):
                size = f"{share // number} of {counted(share, 'sample')} a rank"
                parts = f"{counted(number, 'part')} with {size} (global_batch_size={batch_size})"
                log.info("accumulate_steps=auto: %s", parts)
                run.progress.micro_batches = {"number": number, "place": self.place}
                run.timing.lap("fitting")
                return number
            log.info("accumulate_steps=%d does not fit on rank %d", number, fits.index(False))
        raise UserError(
            f"accumulate_steps=auto: the smallest parts of a batch do not fit into the memory of "
            f"{run.device}, with accumulate_margin={margin}; see docs/cost.md"
        )

    def fits(self, batch: Any) -> bool:
        """Return True if this rank's memory holds a part of a batch in forward and backward, beside
        the gradients of the part before and what the optimizer will hold."""
        run, (inputs, targets) = self.run, batch
        model = self.model
        if isinstance(model, DistributedDataParallel):
            model = model.module  # which exchanges nothing
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        held = sum(tensor.nbytes for tensor in tensors_of([*run.state["optimizer"].state.values()]))
        missing = OPTIMIZER_STATE * sum(parameter.nbytes for parameter in trained) - held
        is_low = run.precision is not torch.float32
        with undone(model, run), limited(run.device, run.cfg.accumulate_margin):
            try:
                reserved = torch.empty(max(0, missing), dtype=torch.uint8, device=run.device)
                for _ in range(2):
                    with torch.autocast(run.device.type, run.precision, enabled=is_low):
                        outputs = model(inputs)
                    self.task.loss(outputs, targets).backward()
                del reserved
            except Exception as error:
                cause = cause_of(error) or ""
                if not cause.endswith((MEMORY, ONE_SAMPLE)):  # BatchNorm needs two samples
                    raise
                return False
        return True


@contextmanager
def undone(model: nn.Module, run: Run) -> Iterator[None]:
    """Undo to the bit what forward and backward in a block change: buffers, gradients, generators.

    Layers of SyncBatchNorm exchange nothing in it.
    """
    copies = [(buffer, buffer.to("cpu", copy=True)) for buffer in model.buffers()]
    synced = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm) and m.training]
    for layer in synced:
        layer.eval()
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([run.device] * (run.device.type == "cuda")):
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    for layer in synced:
        layer.train()
    for buffer, copy in copies:
        buffer.copy_(copy)
    model.zero_grad(set_to_none=True)
    if run.cfg.model.compile:
        torch.compiler.reset()  # it would keep what it compiled for other sizes
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def limited(device: torch.device, margin: float) -> Iterator[None]:
    """Leave a share of a GPU's memory free in a block, besides what other processes use."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    free, total = torch.cuda.mem_get_info(device)
    share = (free + torch.cuda.memory_reserved(device)) / total - margin
    torch.cuda.set_per_process_memory_fraction(max(0.0, min(before, share)), device)
    yield
    torch.cuda.set_per_process_memory_fraction(before, device)


def set_gradient_sync(model: Any, syncs: bool) -> None:
    """Choose if the next backward exchanges gradients; to be called before forward.

    A model that is not wrapped in DDP or FSDP stays as it is.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = syncs  # what its no_sync() sets
    elif any(map(is_sharded, model.parameters())):
        model.set_requires_gradient_sync(syncs)
