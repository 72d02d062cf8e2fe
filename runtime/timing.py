"""Seconds that a run spends in each phase, and its speed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

_previous_end: float | None = None
"""End of the job before this one in a multirun, in seconds since 1970."""


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event in the current stream of the device; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Timing:
    """Seconds by phase of a run, without gaps.

    The host runs ahead of a GPU. The GPU's steps are counted where the host waits for it, and its
    wait for data is the time in which the GPU, not the host, has no batch to work on.

    Attributes:
        seconds: seconds so far, by phase.
        num_images, num_steps: number of training images of all ranks, and of steps, after the first
            step.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        record_event: Callable[[torch.device], Any] = record_event,
    ) -> None:
        """Start at the start of this process or, in a multirun, at the end of the previous job."""
        self.device, self.clock, self.record_event = device, clock, record_event
        begin = psutil.Process().create_time() if _previous_end is None else _previous_end
        self.seconds = {"start_up": time.time() - begin}
        self.num_images = self.num_steps = 0
        self.mark = clock()
        # For each wait for a batch since the device was last known to be finished: seconds on the
        # host, begin and end on the device.
        self.waits: list[tuple[float, Any, Any]] = []

    def lap(self, phase: str) -> float:
        """Count the time since the last lap as a phase of the run; returns its seconds."""
        before, self.mark = self.mark, self.clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self.mark - before
        return self.mark - before

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Measure the wait for the next batch in the block."""
        begin = self.record_event(self.device)
        yield
        end, seconds = self.record_event(self.device), self.lap("data_wait")
        if begin is not None and end is not None:
            self.waits.append((seconds, begin, end))

    def count_images(self, num_images: int) -> None:
        """Count the images of a step of all ranks; speeds leave out the first step."""
        if "first_step" in self.seconds:
            self.num_images += num_images
            self.num_steps += 1

    def end_step(self) -> None:
        """End a step on the host.

        The first step counts separately: it also fills queues, compiles and connects the ranks.
        """
        self.lap("compute")
        if "first_step" not in self.seconds:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.finished()
            self.seconds["first_step"] = self.seconds.pop("data_wait") + self.seconds.pop("compute")

    def finished(self) -> None:
        """Count the steps so far; call it where the device has finished them."""
        self.lap("compute")
        for seconds, begin, end in self.waits:
            excess = seconds - begin.elapsed_time(end) / 1000
            self.seconds["data_wait"] -= excess
            self.seconds["compute"] += excess
        self.waits.clear()

    def end(self) -> None:
        """End the run; later time belongs to the next one."""
        global _previous_end
        self.lap("other")
        _previous_end = time.time()

    @property
    def train_s(self) -> float:
        """Seconds of the steps after the first one; to be read after `finished()`."""
        return self.seconds.get("data_wait", 0.0) + self.seconds.get("compute", 0.0)

    @property
    def images_per_s(self) -> float:
        """Training images of all ranks per second of `train_s`; 0 until a second step has ended."""
        return self.num_images / self.train_s if self.train_s else 0.0

    @property
    def data_wait_share(self) -> float:
        """Share of `train_s` in which the device waited for a batch, in [0, 1]."""
        return self.seconds.get("data_wait", 0.0) / self.train_s if self.train_s else 0.0

    def speed(self) -> str:
        """Return the speed as text, such as `120 samples/s`."""
        return f"{self.images_per_s:.{0 if self.images_per_s >= 10 else 1}f} samples/s"

    def time_of(self, num_steps: int) -> str:
        """Return the time that so many steps take at the speed so far, such as `0:03:12`."""
        minutes, seconds = divmod(round(num_steps * self.train_s / self.num_steps), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
