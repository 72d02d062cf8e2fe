"""The fewest micro-batches that fit into memory, for `accumulate_steps=auto`."""

import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conf.errors import ONE_SAMPLE, UserError, cause_of, counted
from loaders.batch import num_samples, part, tensors_of
from runtime.memory import is_out_of_memory, local
from runtime.run import Run
from tasks import Task

log = logging.getLogger(__name__)


def find(run: Run, model: nn.Module, task: Task, place: dict[str, Any], batch: Any) -> int:
    """Try 1, 2, ... micro-batches until they fit on all ranks, of which no one waits for another
    but to compare results.

    Raises:
        UserError: not even the smallest fit.
    """
    batch_size = run.cfg.global_batch_size
    share = batch_size // run.group.world_size
    for number in (n for n in range(1, share + 1) if share % n == 0):
        fits = run.group.gather(trial(run, model, task, batch, number))
        if all(fits):
            size = f"{share // number} of {counted(share, 'sample')} a rank"
            parts = f"{counted(number, 'part')} with {size} (global_batch_size={batch_size})"
            log.info("accumulate_steps=auto: %s", parts)
            run.progress.micro_batches = {"number": number, "place": place}
            run.timing.lap("fitting")
            return number
        log.info("accumulate_steps=%d does not fit on rank %d", number, fits.index(False))
    raise UserError(
        f"accumulate_steps=auto: the smallest parts of a batch do not fit into the memory of "
        f"{run.device}, with accumulate_margin={run.cfg.accumulate_margin}; see docs/cost.md"
    )


def trial(run: Run, model: nn.Module, task: Task, batch: Any, number: int) -> bool:
    """Return True if so many micro-batches fit into this rank's memory; undo their steps."""
    if isinstance(model, DistributedDataParallel):
        model = model.module  # which exchanges nothing
    with undone(run, model), alone(model), limited(run.device, run.cfg.accumulate_margin):
        try:
            train(run, model, task, batch, number)
        except Exception as error:
            is_too_small = number > 1 and ONE_SAMPLE in (cause_of(error) or "")  # for BatchNorm
            if not is_too_small and not is_out_of_memory(error):
                raise
            return False
    return True


def train(run: Run, model: nn.Module, task: Task, batch: Any, number: int) -> None:
    """Make two steps, as the script does: the second has the optimizer's state in memory, and the
    second micro-batch the gradients of the first. Further ones need no more."""
    size, is_low = num_samples(batch) // number, run.precision is not torch.float32
    set_sync: Any = getattr(model, "set_requires_gradient_sync", lambda is_last: None)  # FSDP's
    places = range(min(number, 2))
    for _ in range(2):
        for place in places:
            set_sync(place == places[-1])
            inputs, targets = part(batch, place * size, (place + 1) * size)
            with torch.autocast(run.device.type, run.precision, enabled=is_low):
                outputs = model(inputs)
            (task.loss(outputs, targets) / number).backward()
        run.state["optimizer"].step()
        run.state["optimizer"].zero_grad(set_to_none=True)


@contextmanager
def undone(run: Run, model: nn.Module) -> Iterator[None]:
    """Undo to the bit what a block changes in weights, buffers, optimizer and generators."""
    optimizer, devices = run.state["optimizer"], [run.device] * (run.device.type == "cuda")
    states = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    changed = [*model.parameters(), *model.buffers(), *tensors_of([*states.values()])]
    copies = [(local(tensor), local(tensor).to("cpu", copy=True)) for tensor in changed]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    optimizer.state.update(states)
    for tensor, copy in copies:
        tensor.copy_(copy)
    if run.cfg.model.compile:
        torch.compiler.reset()  # it would keep what it compiled for other sizes
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model that is spread over ranks exchange nothing in a block."""
    synced = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm) and m.training]
    for layer in synced:
        layer.eval()
    is_sharded = hasattr(model, "set_requires_gradient_sync")
    with import_module("runtime.fsdp").without_exchange(model) if is_sharded else nullcontext():
        yield
    for layer in synced:
        layer.train()


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
