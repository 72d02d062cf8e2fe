"""A training step as in the training scripts, without their `Run`, on one or several ranks."""

import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast

from benchmarks.interleave import CountItems
from benchmarks.template import endless
from conf.schema import Config
from runtime.amp import amp_dtype
from runtime.timing import Timing

HOST = "127.0.0.1"
RankWorkload = Callable[[int, CountItems], Any]


def train(
    cfg: Config,
    parts: tuple[Any, ...],
    device: torch.device,
    count_items: CountItems,
    amp: bool = False,
) -> None:
    """Train endlessly and count the samples of each step.

    Args:
        cfg, device, amp: see `steps()`.
        parts: parts of the template, see `template.parts()`.
        count_items: called after each step; ends the training.
    """
    loader, *others = parts
    for number in steps(cfg, tuple(others), device, endless(loader), amp):
        count_items(number)


def steps(
    cfg: Config,
    parts: tuple[Any, ...],
    device: torch.device,
    batches: Iterator[Any],
    amp: bool = False,
) -> Iterator[int]:
    """Train on each batch; yield its number of samples.

    Args:
        cfg: AMP precision and maximum gradient norm.
        parts: task, model, optimizer and scheduler of `template.parts()`.
        device: device of these.
        batches: inputs and targets.
        amp: compute in `cfg.amp.dtype`, as `train_amp.py`.
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
    """Batches, with the waits for them and the steps on them measured by `timing`."""
    timing.lap("other")
    while True:
        with timing.data_wait():
            batch = next(batches)
        timing.count_images(len(batch[0]))
        yield batch
        timing.end_step()


def on_ranks(
    workload: RankWorkload,
    world_size: int,
    backend: str,
    count_items: CountItems,
    lockstep: bool = False,
) -> None:
    """Run a workload as rank 0 in this process and as the other ranks in child processes.

    Args:
        workload: picklable; called on each rank with its number, inside the process group.
        world_size: number of ranks.
        backend: `gloo` or `nccl`.
        count_items: called by rank 0 with its own items.
        lockstep: the other ranks wait for rank 0 after each piece of work. Otherwise they run until
            a collective operation blocks them, which on a GPU takes time from other workloads.
    """
    # Forking is fast, and safe in a process that has not started any computation.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    permits = [context.Semaphore(0) for _ in range(1, world_size)]
    ports = context.SimpleQueue()
    shared = (workload, world_size, backend, ports)
    for rank, permit in enumerate(permits, start=1):
        follow = partial(_wait_for_rank_0, permit if lockstep else None)
        context.Process(target=_run_rank, args=(*shared, rank, follow), daemon=True).start()
    # Last, because a fork beside the store's thread can inherit a lock that it holds.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    for _ in range(world_size):
        ports.put(store.port)

    def count_and_release(number: int) -> None:
        count_items(number)
        for permit in permits:
            permit.release()

    _run_rank(*shared, 0, count_and_release)


def _wait_for_rank_0(permit: Any, _: int) -> None:
    if permit is not None:
        permit.acquire()


def _run_rank(
    workload: RankWorkload,
    world_size: int,
    backend: str,
    ports: Any,
    rank: int,
    count_items: CountItems,
) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    store = dist.TCPStore(HOST, ports.get(), is_master=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, device_id=device
    )
    workload(rank, count_items)
