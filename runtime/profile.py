"""A trace of some steps of a run."""

import logging
from pathlib import Path

from torch.profiler import ProfilerAction, profile

log = logging.getLogger(__name__)


def profiler_of(steps: list[int] | None, path: Path) -> profile | None:
    """Return a profiler that writes a trace of some training steps of this process, if any.

    Between `start()` and `stop()`, each call of its `step()` ends a training step. The ranges of
    steps, optimizers and wrappers in the trace are PyTorch's own.

    Args:
        steps: numbers of steps to skip and to record; None: no profiler.
        path: file of the trace, .json.gz, which Perfetto opens.
    """
    if steps is None:
        return None
    num_skipped, num_recorded = steps

    def action(step: int) -> ProfilerAction:
        if not num_skipped <= step < num_skipped + num_recorded:
            return ProfilerAction.NONE
        is_last = step == num_skipped + num_recorded - 1
        return ProfilerAction.RECORD_AND_SAVE if is_last else ProfilerAction.RECORD

    def write(trace: profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
        log.info("profile.steps: open %s in https://ui.perfetto.dev", path)

    return profile(schedule=action, on_trace_ready=write)
