"""The speed and the memory of a run, as loggers show them: `perf/...`."""

import socket
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from conf.schema import Config
from loaders import Loader
from loaders.common import num_samples
from runtime.flops import flops_per_sample, peak_of
from runtime.gpu_monitor import GpuMonitor
from runtime.group import SingleProcess
from runtime.timing import Timing

MEMORY = "perf/peak_memory_gib"


class Speed:
    """Measures a run; every rank calls its methods. Of several, `ranks` compares them."""

    def __init__(
        self, cfg: Config, loader: Loader, group: SingleProcess, timing: Timing, device: Any
    ) -> None:
        self.cfg, self.loader, self.group, self.timing = cfg, loader, group, timing
        self.gpu, self.peak_memory = GpuMonitor(device), 0.0
        self.peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.uncounted: nn.Module | None = None
        self.flops: float | None = None
        self.ranks: Any = None

    def open_run(self, model: nn.Module) -> None:
        """Watch a model before it is wrapped."""
        self.uncounted = model if self.group.rank == 0 else None
        if self.group.world_size > 1:
            slow_ranks = import_module("runtime.distributed").SlowRanks  # one process has none
            self.ranks = slow_ranks(model, self.timing)

    def begin_step(self, batch: tuple[Any, Any]) -> None:
        """Begin a step with a batch of this rank."""
        self.timing.count_images(num_samples(batch) * self.group.world_size)
        if self.uncounted is not None:
            self.flops = flops_per_sample(self.cfg, self.loader, self.uncounted, batch[0])
            self.uncounted = None
        if self.ranks is not None:
            self.ranks.begin_step()

    def exchange(self) -> None:
        """Compare the ranks; to be called where the device has finished its steps."""
        if self.ranks is not None:
            own = self.ranks.own_seconds(), self.gpu.values().get(MEMORY, 0.0)
            told = self.group.gather((socket.gethostname(), *own))
            hosts, seconds, memories = zip(*told, strict=True)
            self.peak_memory = max(memories)
            if self.group.rank == 0:
                self.ranks.judge(hosts, np.array(seconds))

    def values(self, slow: Any = None) -> dict[str, float]:
        """Return what is known, by the names that loggers show, with a rank that is slow."""
        values, timing = self.gpu.values(), self.timing
        if MEMORY in values:
            values[MEMORY] = max(values[MEMORY], self.peak_memory)
        if timing.num_images:
            values["perf/images_per_s"] = timing.images_per_s
            values["perf/data_wait_share"] = timing.data_wait_share
        if timing.num_images and self.flops is not None:
            tflops = self.flops * timing.images_per_s / self.group.world_size / 1e12
            values["perf/tflops_per_s"] = tflops
            values |= {"perf/mfu": tflops / self.peak} if self.peak else {}
        return values | ({"perf/slowest_rank": slow.rank} if slow else {})
