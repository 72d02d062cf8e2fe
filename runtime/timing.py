"""Where the time of a run goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from conf.schema import Config

WORTH_MENTIONING = 0.1
"""Share of the time waiting for data above which a run is called input-bound."""

_previous_end = psutil.Process().create_time()
"""When this process or, in a multirun, its job before this one was done with: seconds since 1970."""


class Timing:
    """Seconds by part of a run, without gaps.

    A GPU works on what it was given while the host is ahead already: its steps count when they are
    finished, which is known where somebody waits for it anyway. And it waits for data while it has nothing
    to do for lack of a batch, not while the host does.

    Attributes:
        seconds: so far, by part.
        num_images: training images of all ranks since the first step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = {"start_up": time.time() - _previous_end}
        self.num_images = 0
        self.mark = time.perf_counter()
        # Of each wait for a batch since the device was last known to be finished: its seconds on the host,
        # and when it began and ended on the device.
        self.waits: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []

    def lap(self, part: str) -> float:
        """Count the time since the last lap as `part` of the run; returns its seconds."""
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        return seconds

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """A wait for the next batch."""
        begin = self._event()
        yield
        end, seconds = self._event(), self.lap("data_wait")
        if begin is not None and end is not None:
            self.waits.append((seconds, begin, end))

    def step(self, num_images: int) -> None:
        """Begin a step with so many images, whose `data_wait` is over."""
        if "first_step" in self.seconds:
            self.num_images += num_images

    def end_step(self) -> None:
        """End a step on the host.

        The first one is kept apart: it also fills queues, compiles and connects the ranks.
        """
        self.lap("compute")
        if "first_step" not in self.seconds:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.finished()
            self.seconds["first_step"] = self.seconds.pop("data_wait") + self.seconds.pop("compute")

    def finished(self) -> None:
        """To be called where the device is known to have finished all steps that were begun."""
        self.lap("compute")
        for seconds, begin, end in self.waits:
            excess = seconds - begin.elapsed_time(end) / 1000
            self.seconds["data_wait"] -= excess
            self.seconds["compute"] += excess
        self.waits.clear()

    def _event(self) -> torch.cuda.Event | None:
        """A mark in the work that the device was given."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def end(self) -> None:
        """End the run: what comes now belongs to the next one."""
        global _previous_end
        self.lap("other")
        _previous_end = time.time()

    @property
    def images_per_s(self) -> float:
        """Training images of all ranks per second of training, without evaluation and saving; right
        after `finished()`.

        The first step is left out: 0 until a second one has ended.
        """
        train_s = self.seconds.get("data_wait", 0.0) + self.seconds.get("compute", 0.0)
        return self.num_images / train_s if train_s else 0.0

    @property
    def data_wait_share(self) -> float:
        """Share of that time in which the device waited for a batch, in [0, 1]."""
        wait_s, compute_s = self.seconds.get("data_wait", 0.0), self.seconds.get("compute", 0.0)
        return wait_s / (wait_s + compute_s) if compute_s else 0.0

    def speed(self) -> str:
        return f"{self.images_per_s:.{0 if self.images_per_s >= 10 else 1}f} images/s"


def verdict(data_wait_share: float, cfg: "Config") -> str:
    """What binds a training run, in short; the template's `benchmarks bottleneck` measures it closely.

    Args:
        data_wait_share: share of the training time in which the device waited for a batch, in [0, 1].
        cfg: what is set already is not recommended.
    """
    waits = f"{data_wait_share:.0%} of the time waiting for data"
    if data_wait_share < WORTH_MENTIONING:
        return f"compute-bound: {waits}"
    options = {
        "loader.num_workers=auto": cfg.loader.num_workers != "auto",
        "loader=dali": cfg.loader.name == "pytorch",
        "loader=packed": cfg.loader.name != "packed" and not cfg.data.layout.startswith("mnist"),
    }
    advice = ", ".join(option for option, is_new in options.items() if is_new)
    return f"input-bound: {waits}; try {advice or 'smaller images'}"
