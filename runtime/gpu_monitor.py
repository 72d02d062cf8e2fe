"""How busy a run's GPU is, and how much of its memory was used."""

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

import torch

DELAY_S, PERIOD_S = 0.5, 0.2
"""Seconds to the first sample, which is the driver's mean over a time before it, and to others."""


class GpuMonitor:
    """Samples the utilisation of a GPU in a thread while training steps are made.

    Utilisation is the share of time in which any kernel runs, as nvidia-smi shows it. Nothing is
    sampled on a CPU, without NVIDIA's driver or the package nvidia-ml-py, and on a slice of a GPU
    (MIG).
    """

    def __init__(
        self,
        device: torch.device,
        read: Callable[[torch.device], float] = torch.cuda.utilization,
    ) -> None:
        """`read` returns a GPU's utilisation in percent."""
        self.device, self.read, self.num_samples, self.sum = device, read, 0, 0.0
        self.stopped: Event | None = None

    def start(self) -> None:
        """Begin to take samples, unless it has begun."""
        if self.device.type == "cuda" and self.stopped is None:
            self.stopped = Event()
            Thread(target=self._sample, args=(self.stopped,), daemon=True).start()

    def stop(self) -> None:
        """Take no more samples until `start()`."""
        if self.stopped is not None:
            self.stopped.set()
            self.stopped = None

    def _sample(self, stopped: Event) -> None:
        delay = DELAY_S
        with suppress(Exception):  # the driver's own type: it cannot be read, or the GPU was lost
            while not stopped.wait(delay):
                self.sum += self.read(self.device) / 100
                self.num_samples += 1
                delay = PERIOD_S

    def values(self) -> dict[str, float]:
        """Return what is known, by the names that loggers show."""
        if self.device.type != "cuda":
            return {}
        values = {"perf/peak_memory_gib": torch.cuda.max_memory_allocated(self.device) / 2**30}
        if self.num_samples:
            values["perf/gpu_utilization"] = self.sum / self.num_samples
        return values
