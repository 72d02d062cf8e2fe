"""A training step: the lines of the entry points without their `Run`, on one or several ranks."""

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast

from benchmarks.template import endless
from benchmarks.turns import Count
from conf.schema import Config
from runtime.amp import amp_dtype
from runtime.timing import Timing

HOST = "127.0.0.1"
RankProgram = Callable[[int, Count], Any]


def train(
    cfg: Config, parts: tuple[Any, ...], device: torch.device, count: Count, amp: bool = False
) -> None:
    """Train on the batches of all epochs, and count the samples of each step; `count` ends it.

    Args:
        cfg, parts, device, amp: as of `steps()`, with the loader as the first part.
        count: called with the number of samples of each step.
    """
    loader, *others = parts
    for number in steps(cfg, tuple(others), device, endless(loader), amp):
        count(number)


def steps(
    cfg: Config,
    parts: tuple[Any, ...],
    device: torch.device,
    batches: Iterator[Any],
    amp: bool = False,
) -> Iterator[int]:
    """Compute loss and gradients of each batch, and update the weights; yields the number of samples.

    Args:
        cfg: precision and limit of the gradients' norm.
        parts: task, model, optimizer and scheduler of `template.parts`.
        device: where they are.
        batches: inputs and targets.
        amp: compute in `cfg.amp.dtype`, as `train_amp.py` does.
    """
    task, model, optimizer, scheduler = parts
    dtype = amp_dtype(cfg.amp.dtype, device) if amp else torch.float32
    scaler = GradScaler(device.type, enabled=dtype == torch.float16)
    model.train()
    for inputs, targets in batches:
        with autocast(device.type, dtype, enabled=amp):
            outputs = model(inputs)
        loss = task.loss(outputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        yield len(inputs)


def timed(batches: Iterator[Any], timing: Timing) -> Iterator[Any]:
    """Batches whose waits, and whose steps until the next one is asked for, are measured."""
    timing.lap("other")
    while True:
        with timing.data_wait():
            batch = next(batches)
        timing.step(len(batch[0]))
        yield batch
        timing.end_step()


def on_ranks(
    program: RankProgram, world_size: int, backend: str, count: Count, in_step: bool = False
) -> None:
    """Let a program work as rank 0 in this process and as the other ranks in processes of their own.

    Args:
        program: called on each rank with its number, in a process group of all; can be pickled.
        world_size: number of ranks.
        backend: `gloo` or `nccl`.
        count: is called by rank 0, with its own items.
        in_step: the others begin each piece of work when rank 0 does. Otherwise they work on until a
            collective holds them, which on a GPU takes time from whoever else is measured.
    """
    # A process that has computed nothing yet may fork, which is quick.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    turns = [context.Semaphore(0) for _ in range(1, world_size)]
    shared = (program, world_size, backend, store.port)
    for rank, turn in enumerate(turns, start=1):
        follow = partial(_wait, turn if in_step else None)
        context.Process(target=_join, args=(*shared, rank, follow), daemon=True).start()

    def count_and_release(number: int) -> None:
        count(number)
        for turn in turns:
            turn.release()

    _join(*shared, 0, count_and_release)


def _wait(turn: Any, _: int) -> None:
    if turn is not None:
        turn.acquire()


def _join(
    program: RankProgram, world_size: int, backend: str, port: int, rank: int, count: Count
) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, device_id=device
    )
    program(rank, count)
