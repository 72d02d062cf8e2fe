"""A trace of some steps of a run."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile

from conf.schema import ProfileConfig

log = logging.getLogger(__name__)


def profiler_of(
    options: ProfileConfig, folder: Path, rank: int, device: torch.device
) -> profile | None:
    """Return a profiler that writes a trace of some training steps of this process, if any.

    Between `start()` and `stop()`, each call of its `step()` ends a training step. The ranges of
    steps, optimizers and wrappers in the trace are PyTorch's own.

    Args:
        options: steps to skip and to record, and if memory is recorded, too.
        folder: folder of the trace, .json.gz, which Perfetto opens.
        rank: number of this process, for the file's name.
        device: device of this process; memory of a GPU is recorded from here on.
    """
    if options.steps is None:
        return None
    num_skipped, num_recorded = options.steps
    path, is_cuda = folder / f"trace-rank{rank}.json.gz", device.type == "cuda"
    if options.memory and is_cuda:
        # PyTorch documents this name, and has no public one.
        torch.cuda.memory._record_memory_history()

    def action(step: int) -> ProfilerAction:
        if not num_skipped <= step < num_skipped + num_recorded:
            return ProfilerAction.NONE
        is_last = step == num_skipped + num_recorded - 1
        return ProfilerAction.RECORD_AND_SAVE if is_last else ProfilerAction.RECORD

    def write(trace: profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
        log.info("profile.steps: open %s in https://ui.perfetto.dev", path)
        if options.memory and is_cuda:
            write_memory(folder, rank)
            torch.cuda.memory._record_memory_history(enabled=None)

    return profile(schedule=action, on_trace_ready=write, profile_memory=options.memory)


def write_memory(folder: Path, rank: int) -> None:
    """Write which lines have allocated the memory of this process's GPU, and when."""
    path = folder / f"memory-rank{rank}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    log.info("profile.memory: open %s in https://pytorch.org/memory_viz", path)
