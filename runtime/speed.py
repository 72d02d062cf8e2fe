"""The speed and the memory of a run, as loggers show them: `perf/...`."""

import logging
import re
import socket
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from conf.errors import told
from conf.schema import Config, LossConfig
from loaders import Loader
from loaders.batch import map_leaves, num_samples, tensors_of
from models import build_model
from runtime.gpu_monitor import GpuMonitor
from runtime.group import SingleProcess
from runtime.timing import Timing
from tasks import build_task

log = logging.getLogger(__name__)

MEMORY = "perf/peak_memory_gib"

PEAKS = {
    "B200": 2250.0,
    "NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "A40": 149.7,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""TFLOP/s of tensor cores in 16 bits, added up in float32, by words of a GPU's name. From NVIDIA's
data sheets and architecture white papers, without sparsity, for which they show twice as much."""


class Speed:
    """Measures a run; every rank calls its methods.

    Attributes:
        slow: `SlowRank` that makes the steps longer, if there are several ranks and one does.
    """

    def __init__(self, cfg: Config, loader: Loader, group: SingleProcess, timing: Timing) -> None:
        self.cfg, self.loader, self.group, self.timing = cfg, loader, group, timing
        device = timing.device
        self.gpu, self.peak_memory = GpuMonitor(device), 0.0
        self.peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.uncounted: nn.Module | None = None
        self.flops: float | None = None
        self.ranks: Any = None
        self.slow: Any = None

    def open_run(self, model: nn.Module) -> None:
        """Watch a model before it is wrapped."""
        self.uncounted = model if self.group.rank == 0 else None
        if self.group.world_size > 1:
            distributed = import_module("runtime.distributed")  # which one process may not have
            self.ranks = distributed.SlowRanks(model, self.timing)

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
            memory = self.gpu.values().get(MEMORY, 0.0)
            all_ranks = self.group.gather((socket.gethostname(), self.ranks.own_seconds(), memory))
            hosts, seconds, memories = zip(*all_ranks, strict=True)
            self.peak_memory = max(memories)
            if self.group.rank == 0:
                self.slow = self.ranks.judge(hosts, np.array(seconds))

    def values(self) -> dict[str, float]:
        """Return what is known, by the names that loggers show."""
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
        return values | ({"perf/slowest_rank": self.slow.rank} if self.slow else {})


def peak_of(name: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s, None if it is not known, as of a slice (MIG)."""
    words = set(re.split(r"[ -]", name))
    fitting = (peak for key, peak in PEAKS.items() if words >= set(key.split()))
    return None if "MIG" in words else next(fitting, None)


def flops_per_sample(cfg: Config, loader: Loader, model: nn.Module, inputs: Any) -> float | None:
    """Count the operations of a training step, forward and backward, on a batch of inputs.

    A second model is called, whose tensors have no values: nothing is computed, drawn or compiled,
    and what a wrapped model computes more, such as activations again, is not counted.

    Returns:
        None if they cannot be counted, as for a model that is not as the configuration says.
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    shapes = map_leaves(lambda x: x.to("meta") if isinstance(x, Tensor) else x, inputs)
    custom = {torch.ops.aten.convolution_backward: _convolution_backward}
    try:
        # Without weights of the classes, which may take long to compute.
        task = build_task(replace(cfg, loss=LossConfig()), loader)
        # A model that draws numbers on the CPU, such as a permutation, would change the run's.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            uncompiled = replace(cfg.model, compile=False)
            twin = build_model(uncompiled, loader.in_channels, task.num_outputs)
            sizes = {sum(p.numel() for p in each.parameters()) for each in (model, twin)}
            with FlopCounterMode(display=False, custom_mapping=custom) as counter:
                outputs = [x for x in tensors_of(twin(shapes)) if x.requires_grad]
                torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
        return counter.get_total_flops() / num_samples((inputs,)) if len(sizes) == 1 else None
    except Exception as error:  # a model may do anything
        log.info("no perf/tflops_per_s: the model's operations cannot be counted: %s", told(error))
        return None


def _convolution_backward(outputs: Any, inputs: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Count each gradient like the forward, by shapes; torch's own formula ignores groups."""
    is_transposed, is_needed = rest[4], rest[7]
    return 2 * prod(inputs if is_transposed else outputs) * prod(weight[1:]) * sum(is_needed[:2])
