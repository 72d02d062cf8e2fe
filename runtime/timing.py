"""Where the time of a run goes: phases, speed, waits for data, the slowest rank, use of the GPU."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from statistics import mean, median_low
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from runtime.process_group import ProcessGroup
from runtime.shards import is_sharded

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
    read at log points, where the host waits for it anyway.

    The own part of a rank's step is its wait for data and its work up to the last gradient, after
    which DistributedDataParallel waits for other ranks. A model whose forward exchanges values
    (FSDP, SyncBatchNorm) makes all ranks look equally slow but for their waits for data.

    Attributes:
        seconds: seconds so far, by phase.
        num_images, num_steps: number of training images of all ranks, and of steps, after the first
            step.
        slow: the slowest rank of several, if it is slow: `rank`, `host` and `slower_by`.
    """

    def __init__(
        self,
        device: torch.device,
        group: ProcessGroup,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start at the start of this process."""
        self.device, self.group, self.clock = device, group, clock
        self.seconds = {"start_up": time.time() - psutil.Process().create_time()}
        self.num_images = self.num_steps = 0
        self.lap_at = clock()
        self.batch_at: Any = None
        self.waits: list[tuple[Any, Any]] = []
        self.own_work: list[tuple[Any, Any]] = []
        self.own_s, self.peak_memory_gib = 0.0, 0.0
        self.utilizations: list[float] = []
        self.slow: dict[str, Any] = {}

    def watch(self, model: nn.Module) -> None:
        """Watch a model's gradients; to be called before it is wrapped."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.group.world_size > 1 and trained and not is_sharded(trained[0]):
            trained[0].register_hook(self._end_own_work)  # the last one to get its gradient

    def _end_own_work(self, gradient: Tensor) -> None:
        if self.batch_at is not None:
            end = self._now()
            self.own_work.append((self.batch_at, end))
            self.batch_at = end  # where the work on the next micro-batch begins

    def _now(self) -> Any:
        """Return this moment: on the host, or of a GPU the event in its current stream."""
        if self.device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as a phase."""
        now = self.clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.lap_at
        self.lap_at = now

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Measure the wait for the next batch in the block."""
        begin = self._now()
        yield
        self.batch_at = self._now()
        self.waits.append((begin, self.batch_at))

    def end_step(self, num_images: int) -> None:
        """End a step with so many images of all ranks.

        The first step counts separately: it also fills queues, compiles and connects the ranks.
        """
        if "first_step" in self.seconds:
            self.num_images += num_images
            self.num_steps += 1
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.waits.clear()
        self.own_work.clear()
        self.lap("first_step")

    def finish_steps(self) -> None:
        """Count the time of the steps so far; to be called where the device has finished them."""
        self.lap("compute")
        waited_s = sum(seconds_between(*wait) for wait in self.waits)
        self.seconds["compute"] -= waited_s
        self.seconds["data_wait"] = self.seconds.get("data_wait", 0.0) + waited_s
        self.own_s += waited_s + sum(seconds_between(*work) for work in self.own_work)
        self.waits.clear()
        self.own_work.clear()

    def log_point(self) -> None:
        """Look at the GPU, and compare the ranks; to be called where the device has finished."""
        self.finish_steps()
        if self.device.type == "cuda":
            self.peak_memory_gib = torch.cuda.max_memory_allocated(self.device) / 2**30
            # Errors are the driver's own: no NVIDIA driver, no package nvidia-ml-py, or MIG.
            with suppress(Exception):
                self.utilizations.append(torch.cuda.utilization(self.device) / 100)
        ranks = self.group.gather((self.own_s, self.peak_memory_gib, socket.gethostname()))
        self.peak_memory_gib = max(memory for _, memory, _ in ranks)
        slowest_s, usual_s = max(ranks)[0], median_low(own_s for own_s, _, _ in ranks)
        self.slow = {}
        if usual_s >= LEAST_S and slowest_s > (1 + SLOW) * usual_s:
            rank = ranks.index(max(ranks))
            self.slow = {"rank": rank, "host": ranks[rank][2], "slower_by": slowest_s / usual_s - 1}

    @property
    def train_s(self) -> float:
        """Seconds of the steps after the first one; to be read after `finish_steps()`."""
        return self.seconds.get("data_wait", 0.0) + self.seconds.get("compute", 0.0)

    def values(self) -> dict[str, float]:
        """Return what is known, by the names that loggers show."""
        values: dict[str, float] = {}
        if self.num_images and self.train_s:
            values["perf/images_per_s"] = self.num_images / self.train_s
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


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments on the host or two events of a GPU."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


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
