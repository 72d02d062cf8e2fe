"""A training step that can be timed in parts: the lines of the entry points without their logger."""

import time
from typing import NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler, autocast

from benchmarks.cases import endless, train_loader
from conf.schema import Config
from models import build_model
from runtime.optimizer import build_optimizer
from runtime.setup import amp_dtype, seed_everything
from runtime.tasks import build_task


class StepTime(NamedTuple):
    """Means over the steps of a window, in seconds."""

    total_s: float
    wait_s: float
    """Of these, waiting for the loader to hand over a batch."""


class TrainingStep:
    """Each call fetches a batch, computes loss and gradients and updates the weights.

    Args:
        cfg: data, loader, model, optimizer and task.
        device: where it is computed.
        rank, world_size: the shard that is read.
        distributed: average the gradients over all ranks.
        amp: compute in `cfg.amp.dtype`, as `train_amp.py` does.
    """

    def __init__(
        self,
        cfg: Config,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        distributed: bool = False,
        amp: bool = False,
    ) -> None:
        seed_everything(cfg.seed)
        self.device = device
        self.loader = train_loader(cfg, device, rank, world_size)
        self.task = build_task(cfg)
        model = build_model(cfg.model, self.loader.in_channels, self.loader.num_classes).to(device)
        self.optimizer, _ = build_optimizer(cfg, model, len(self.loader))
        self.model = nn.parallel.DistributedDataParallel(model) if distributed else model
        self.dtype = amp_dtype(cfg.amp.dtype, device)
        self.amp = amp
        self.scaler = GradScaler(device.type, enabled=amp and cfg.amp.dtype == "float16")
        self.batches = endless(self.loader)
        self.wait_s = 0.0

    def __call__(self) -> int:
        """One step; returns the number of samples of this rank."""
        start = time.perf_counter()
        inputs, targets = next(self.batches)
        self.wait_s += time.perf_counter() - start
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device.type, self.dtype, enabled=self.amp):
            loss = self.task.loss(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return len(inputs)

    def time(self, num_steps: int) -> StepTime:
        """So many steps, from and to the moment at which the device has done all its work."""
        self.synchronise()
        self.wait_s = 0.0
        start = time.perf_counter()
        for _ in range(num_steps):
            self()
        self.synchronise()
        total_s = time.perf_counter() - start
        return StepTime(total_s / num_steps, self.wait_s / num_steps)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
