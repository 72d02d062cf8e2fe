"""A trace of some steps of a run."""
# ruff: noqa: SLF001 (PyTorch's guide to snapshots of memory uses these functions)

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

from conf.schema import ProfileConfig

log = logging.getLogger(__name__)


def profiler_of(
    options: ProfileConfig, folder: Path, rank: int, device: torch.device
) -> profile | None:
    """Return a profiler that writes a trace of some training steps of this process, .json.gz, to a
    folder; None without `profile.steps`.

    As a context, each call of its `step()` ends a training step. The ranges of steps, optimizers
    and wrappers in the trace are PyTorch's own.
    """
    if options.steps is None:
        return None
    num_skipped, num_recorded = options.steps
    records_gpu = options.memory and device.type == "cuda"

    def write_memory(*_: object) -> None:
        path = folder / f"memory-rank{rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        log.info("profile.memory: open %s in https://pytorch.org/memory_viz", path)

    def write(trace: profile) -> None:
        path = folder / f"trace-rank{rank}.json.gz"
        trace.export_chrome_trace(str(path))
        log.info("profile.steps: open %s in https://ui.perfetto.dev", path)
        if records_gpu:
            write_memory()

    if records_gpu:
        torch.cuda.memory._record_memory_history()
        attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        attach(write_memory)

    warmup = min(num_skipped, 1)
    skipped = {"skip_first": num_skipped - warmup, "warmup": warmup, "wait": 0}
    plan = schedule(**skipped, active=num_recorded, repeat=1)
    return profile(schedule=plan, on_trace_ready=write, profile_memory=options.memory)
