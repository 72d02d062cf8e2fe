"""Where the time of a run goes: phases, speed, waits for data, the slowest rank, use of the GPU."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from statistics import mean, median_low
from typing import Any

import psutil
import torch
from torch import nn

from runtime.process_group import ProcessGroup, is_sharded

INPUT_BOUND, BUSY = 0.2, 0.8
"""Share of the time waiting for data from which on a run is called input-bound; utilisation of a
GPU below which it is host-bound, if it does not wait for data."""

ADVICE = {
    "input": "; try python -m tools.bottleneck, or a larger loader.num_workers",
    "host": "; try model.compile=true, or a larger global_batch_size",
    "compute": "",
}

SLOW, LEAST_S = 0.1, 2.0
"""A rank is slow if its own part of the steps takes longer than the others' by this share; before
theirs has taken so many seconds, a difference may be noise."""


class Timer:
    """Measures a run; every rank calls its methods.

    The host runs ahead of a GPU. So waits for data are measured by events on the device, which are
    read at log points and before a save, where the host waits for it anyway.

    The own part of a rank's step is its wait for data and its work up to the last gradient, after
    which DistributedDataParallel waits for other ranks. A model whose forward exchanges values
    (FSDP, SyncBatchNorm) makes all ranks look equally slow but for their waits for data.
    """

    idle_since = 0.0
    """Time at which an earlier run of this process has ended; 0: there was none."""

    def __init__(
        self,
        device: torch.device,
        group: ProcessGroup,
        batch_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure the ranks of a group; a step has `batch_size` images of all of them."""
        self.device, self.group, self.clock = device, group, clock
        self.batch_size = batch_size
        begin = self.idle_since or psutil.Process().create_time()
        self.seconds = {"start_up": time.time() - begin}  # by phase
        self.lap_at = clock()
        self.num_steps = 0  # after the first one
        self.marks: list[tuple[str, Any]] = []
        self.own_s, self.peak_memory_gib = 0.0, 0.0
        self.utilizations: list[float] = []
        self.slow: dict[str, Any] = {}  # if one is slow: its `rank`, `host` and `slower_by`

    def watch(self, model: nn.Module) -> None:
        """Watch the gradients of a model, which may be wrapped in another one."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.group.world_size > 1 and trained and not is_sharded(trained[0]):
            # The last one to get its gradient
            trained[0].register_hook(lambda gradient: self.mark("own_work"))

    def mark(self, phase: str) -> None:
        """End a part of a step, which began at the last mark: `data_wait`, `own_work` (of this
        rank, up to its last gradient) or its `rest`."""
        self.marks.append((phase, self._now()))

    def _now(self) -> Any:
        """Return this moment: on the host, or of a GPU the event in its current stream."""
        if self.device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _wait(self) -> None:
        """Wait until the device has finished its work so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as a phase."""
        now = self.clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.lap_at
        self.lap_at = now

    def end_step(self) -> None:
        """End a step; the first one counts separately: it also fills queues, compiles and connects
        the ranks."""
        if "first_step" in self.seconds:
            self.num_steps += 1
            return
        self._wait()
        self.marks.clear()
        self.lap("first_step")

    def finish_steps(self) -> None:
        """Wait for the device, and count the time of the steps so far."""
        self._wait()  # events that it has not reached cannot be read
        self.lap("compute")
        spent = {"data_wait": 0.0, "own_work": 0.0, "rest": 0.0}
        for (_, begin), (phase, end) in pairwise(self.marks):
            is_time = isinstance(begin, float)
            spent[phase] += end - begin if is_time else begin.elapsed_time(end) / 1000
        self.marks.clear()
        self.seconds["compute"] -= spent["data_wait"]
        self.seconds["data_wait"] = self.seconds.get("data_wait", 0.0) + spent["data_wait"]
        self.own_s += spent["data_wait"] + spent["own_work"]

    def log_point(self) -> None:
        """Count the time of the steps so far, look at the GPU, and compare the ranks."""
        self.finish_steps()
        if self.device.type == "cuda":
            self.peak_memory_gib = torch.cuda.max_memory_allocated(self.device) / 2**30
            # Errors are the driver's own: no NVIDIA driver, no package nvidia-ml-py, or MIG.
            with suppress(Exception):
                self.utilizations.append(torch.cuda.utilization(self.device) / 100)
        ranks = self.group.gather((self.own_s, self.peak_memory_gib, socket.gethostname()))
        self.peak_memory_gib = max(memory for _, memory, _ in ranks)
        usual_s = median_low(own_s for own_s, _, _ in ranks)
        slowest_s, _, host = max(ranks)
        self.slow = {}
        if usual_s >= LEAST_S and slowest_s > (1 + SLOW) * usual_s:
            rank = ranks.index(max(ranks))
            self.slow = {"rank": rank, "host": host, "slower_by": slowest_s / usual_s - 1}

    @property
    def train_s(self) -> float:
        """Seconds of the steps after the first one; to be read after `finish_steps()`."""
        return self.seconds.get("data_wait", 0.0) + self.seconds.get("compute", 0.0)

    def values(self) -> dict[str, float]:
        """Return what is known, by the names that loggers show."""
        values: dict[str, float] = {}
        if self.num_steps and self.train_s:
            values["perf/images_per_s"] = self.num_steps * self.batch_size / self.train_s
            values["perf/data_wait_share"] = self.seconds["data_wait"] / self.train_s
        if self.device.type == "cuda":
            values["perf/peak_memory_gib"] = self.peak_memory_gib
        if self.utilizations:
            values["perf/gpu_utilization"] = mean(self.utilizations)
        if self.slow:
            values["perf/slowest_rank"] = self.slow["rank"]
        return values

    def time_of(self, num_steps: int) -> str:
        """Return the time that so many steps take at the speed so far, such as `0:03:12`."""
        return str(timedelta(seconds=round(num_steps * self.train_s / self.num_steps)))


def speed_text(values: dict[str, float]) -> str:
    """Return the speed in `Timer.values()` as text, such as `120 samples/s`."""
    speed = values["perf/images_per_s"]
    return f"{speed:.{0 if speed >= 10 else 1}f} samples/s"


def bottleneck(values: dict[str, float]) -> tuple[str, str]:
    """Return what limits the speed, such as `compute-bound: 3% of the time waiting for data`, and
    the advice for that; from `Timer.values()`."""
    waits, busy = values["perf/data_wait_share"], values.get("perf/gpu_utilization", 1.0)
    kind = "input" if waits >= INPUT_BOUND else "compute" if busy >= BUSY else "host"
    kernels = f", GPU busy {busy:.0%}" if "perf/gpu_utilization" in values else ""
    return f"{kind}-bound: {waits:.0%} of the time waiting for data{kernels}", ADVICE[kind]
