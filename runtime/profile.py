"""A trace of some steps of a run."""
# ruff: noqa: SLF001 (the functions that record memory are documented by PyTorch)

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

log = logging.getLogger(__name__)


def profiler_of(
    steps: list[int], with_memory: bool, folder: Path, rank: int, device: torch.device
) -> profile:
    """Return a profiler that writes a trace of some training steps of this process.

    Between `start()` and `stop()`, each call of its `step()` ends a training step. The ranges of
    steps, optimizers and wrappers in the trace are PyTorch's own.

    Args:
        steps: numbers of steps to skip and to record.
        with_memory: record memory, too; that of a GPU from here on.
        folder: folder of the trace, .json.gz, which Perfetto opens.
        rank, device: number of this process, for the file's name, and its device.
    """
    num_skipped, num_recorded = steps
    records_gpu = with_memory and device.type == "cuda"
    if records_gpu:
        # PyTorch documents this name, and has no public one.
        torch.cuda.memory._record_memory_history()
        # As PyTorch's guide to snapshots does it.
        attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        attach(lambda device, size, device_size, free: write_memory(folder, rank))

    def write(trace: profile) -> None:
        path = folder / f"trace-rank{rank}.json.gz"
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
        log.info("profile.steps: open %s in https://ui.perfetto.dev", path)
        if records_gpu:
            write_memory(folder, rank)
            torch.cuda.memory._record_memory_history(enabled=None)

    warmup = min(num_skipped, 1)
    plan = schedule(
        skip_first=num_skipped - warmup, wait=0, warmup=warmup, active=num_recorded, repeat=1
    )
    return profile(schedule=plan, on_trace_ready=write, profile_memory=with_memory)


def write_memory(folder: Path, rank: int) -> None:
    """Write which lines have allocated the memory of this process's GPU, and when."""
    path = folder / f"memory-rank{rank}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    log.info("profile.memory: open %s in https://pytorch.org/memory_viz", path)
