"""How busy a run's GPU is, and how much of its memory was used."""

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import torch

DELAY_S, PERIOD_S = 0.5, 0.2
"""Seconds to the first sample, which is the driver's mean over a time before it, and to others."""


class GpuMonitor:
    """Samples the utilisation of a GPU in a thread while training steps are made.

    It is the share of time in which any kernel runs, as nvidia-smi shows it. There is none on a
    CPU, without NVIDIA's driver or the package nvidia-ml-py, and on parts of a GPU (MIG).
    """

    def __init__(
        self,
        device: torch.device,
        properties: Callable[[torch.device], Any] = torch.cuda.get_device_properties,
    ) -> None:
        """Find the device in the driver; `properties` returns an object with the device's uuid."""
        self.device, self.num_samples, self.sum = device, 0, 0.0
        self.read: Callable[[], float] | None = None
        self.stopped: Event | None = None
        if device.type == "cuda":
            with suppress(ImportError):
                self.read = utilization_reader(f"GPU-{properties(device).uuid}")

    def start(self) -> None:
        """Begin to take samples, unless it has begun."""
        if self.read is not None and self.stopped is None:
            self.stopped = Event()
            Thread(target=self._sample, args=(self.read, self.stopped), daemon=True).start()

    def stop(self) -> None:
        """Take no more samples until `start()`."""
        if self.stopped is not None:
            self.stopped.set()
            self.stopped = None

    def _sample(self, read: Callable[[], float], stopped: Event) -> None:
        delay = DELAY_S
        with suppress(Exception):  # the driver's own type: the GPU was lost or reset
            while not stopped.wait(delay):
                self.sum, self.num_samples = self.sum + read(), self.num_samples + 1
                delay = PERIOD_S

    def values(self) -> dict[str, float]:
        """Return what is known, by the names that loggers show."""
        if self.device.type != "cuda":
            return {}
        values = {"perf/peak_memory_gib": torch.cuda.max_memory_allocated(self.device) / 2**30}
        if self.num_samples:
            values["perf/gpu_utilization"] = self.sum / self.num_samples
        return values


def utilization_reader(uuid: str) -> Callable[[], float] | None:
    """Return a function that reads a GPU's utilisation in [0, 1]; None: the driver gives none."""
    import pynvml

    def read() -> float:
        return pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100

    try:
        pynvml.nvmlInit()
        # Not by its number, which CUDA_VISIBLE_DEVICES changes for CUDA alone.
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        read()
    except pynvml.NVMLError:
        return None
    return read
