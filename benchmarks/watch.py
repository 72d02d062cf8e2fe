"""What a GPU does: its utilisation, as NVML counts it, and what decodes JPEGs, as a trace shows."""

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines import optional

BUSY = "GPU utilisation"
NUM_TRACED = 6
"""Traced batches. The first ones were decoded before."""


class Utilisation:
    """Utilisation in % of a GPU and of its JPEG engines while the block runs, sampled in the
    background; empty without NVML."""

    def __init__(self, device: torch.device) -> None:
        self.samples: dict[str, list[int]] = {BUSY: [], "JPEG engines": []}
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._sample, args=(device,), daemon=True)

    def __enter__(self) -> "Utilisation":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()

    def _sample(self, device: torch.device) -> None:
        gpu, engines = self.samples.values()
        with suppress(Exception):  # NVML is missing or does not know the GPU
            nvml = optional("pynvml", "nvidia-ml-py")
            nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            while not self.done.wait(0.1):
                gpu.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                with suppress(nvml.NVMLError):  # has no JPEG engines
                    engines.append(nvml.nvmlDeviceGetJpgUtilization(handle)[0])

    def means(self) -> dict[tuple[str, str], list[float]]:
        """Means by (quantity, unit); the first samples are from before the block."""
        late = {name: samples[5:] for name, samples in self.samples.items()}
        return {(name, "%"): [sum(some) / len(some)] for name, some in late.items() if some}


def decoder_of(batches: Iterator[Any], device: torch.device) -> tuple[bool, str]:
    """Whether a GPU decodes the JPEGs of the next batches, and the reasons."""
    num_samples = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_TRACED):
            num_samples += len(next(batches)[0])
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return judge(events, num_samples)


def judge(events: list[dict[str, Any]], num_samples: int) -> tuple[bool, str]:
    """See `decoder_of`; `events`: of a trace of these samples."""
    kernels = {event["name"] for event in events if event.get("cat") == "kernel"}
    copies = [e["args"]["bytes"] for e in events if e.get("name", "").startswith("Memcpy HtoD")]
    by_nvjpeg = [name for name in kernels if "nvjpeg" in name]
    by_cuda = any("dct" in name.lower() for name in by_nvjpeg)
    who = "no kernel of nvJPEG" if not by_nvjpeg else "kernels of nvJPEG"
    who += ", which decode" if by_cuda else ", none of which decodes" if by_nvjpeg else ""
    copied = f"{sum(copies) / max(1, num_samples) / 1000:.0f} kB a sample copied to the device"
    if not kernels:
        return True, "decoder unknown: the trace is empty"
    return bool(by_nvjpeg), f"{who}; {copied}"
