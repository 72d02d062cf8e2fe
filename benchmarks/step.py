"""A training step: the lines of the entry points without their `Run`, on one or several ranks."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast

from benchmarks.run import Draw
from benchmarks.template import Parts, endless
from conf.schema import Config
from runtime.setup import amp_dtype

HOST = "127.0.0.1"


def training_step(cfg: Config, parts: Parts, device: torch.device, amp: bool = False) -> Draw:
    """Fetches a batch, computes loss and gradients and updates the weights.

    Args:
        cfg: precision and limit of the gradients' norm.
        parts: what `template.parts` built.
        device: where they are.
        amp: compute in `cfg.amp.dtype`, as `train_amp.py` does.
    """
    loader, task, model, optimizer, scheduler = parts
    batches, dtype = endless(loader), amp_dtype(cfg.amp.dtype, device) if amp else torch.float32
    scaler = GradScaler(device.type, enabled=amp and cfg.amp.dtype == "float16")
    model.train()

    def step() -> int:
        inputs, targets = next(batches)
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
        return len(inputs)

    return step


def on_ranks(
    build: Callable[[int], Draw], world_size: int, backend: str, in_step: bool = False
) -> Draw:
    """What rank 0 draws in this process, while the other ranks draw in processes of their own.

    Args:
        build: called on each rank with its number, in a process group of all; can be pickled.
        world_size: number of ranks.
        backend: `gloo` or `nccl`.
        in_step: the others start each draw when rank 0 does. Otherwise they draw on until a collective
            holds them, which on a GPU takes time from whoever else is measured.
    """
    # A process that has computed nothing yet may fork, which is quick.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    turns = [context.Semaphore(0) for _ in range(1, world_size)]
    for rank, turn in enumerate(turns, start=1):
        arguments = (build, rank, world_size, backend, store.port, turn if in_step else None)
        context.Process(target=_follow, args=arguments, daemon=True).start()
    own = _join(build, 0, world_size, backend, store)

    def draw() -> int:
        for turn in turns:
            turn.release()
        return own()

    return draw


def _join(
    build: Callable[[int], Draw], rank: int, world_size: int, backend: str, store: dist.Store
) -> Draw:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return build(rank)


def _follow(
    build: Callable[[int], Draw], rank: int, size: int, backend: str, port: int, turn: Any
) -> None:
    draw = _join(build, rank, size, backend, dist.TCPStore(HOST, port, is_master=False))
    while True:
        if turn is not None:
            turn.acquire()
        draw()
