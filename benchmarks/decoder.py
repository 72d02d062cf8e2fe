"""What decodes JPEGs on a GPU, as a trace shows."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NUM_TRACED = 6
"""Traced batches. The first ones were decoded before."""


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
