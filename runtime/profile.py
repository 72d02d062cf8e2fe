"""A trace of some steps of a run, with their phases as named ranges."""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from conf.schema import Config
from runtime.timing import Timing

log = logging.getLogger(__name__)


class ProfiledTiming(Timing):
    """Timing of a run that also writes a trace of its steps, which Perfetto opens, on each rank.

    The ranges of a step are `data wait`, `forward`, `loss and backward` (with clipping),
    `optimizer` and `record`; what is between the steps of two epochs has none. A compiled model's
    `forward` includes loss and backward. A run that fails or stops while it records has no trace.
    """

    def __init__(
        self, cfg: Config, model: nn.Module, run_dir: Path, rank: int, device: torch.device
    ) -> None:
        """Skip and record as many steps of this process as `cfg.profile.steps` has.

        Args:
            cfg: configuration of the run.
            model: model before it is wrapped.
            run_dir: folder of the traces.
            rank: rank of this process, for the name of its file.
            device: device of the steps.
        """
        super().__init__(device)
        self.num_skipped, self.num_recorded = cfg.profile.steps or (0, 0)
        self.model, self.is_compiled = model, cfg.model.compile
        self.rank, self.path = rank, run_dir / f"trace-rank{rank}.json.gz"
        self.num_steps = 0
        self.profiler: profile | None = None
        self.range, self.hooks = ExitStack(), ExitStack()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        if self.num_steps == self.num_skipped and self.profiler is None:
            self._start()
        self.phase("data wait")
        with super().data_wait():
            yield
        self.range.close()

    def step(self, num_images: int) -> None:
        super().step(num_images)
        if self.is_compiled:
            self.phase("forward")

    def phase(self, name: str) -> None:
        self.range.close()
        if self.profiler is not None:
            self.range.enter_context(record_function(name))

    def end_step(self) -> None:
        self.range.close()
        super().end_step()
        self.num_steps += 1
        if self.num_steps == self.num_skipped + self.num_recorded:
            self._stop()

    def end(self) -> None:
        if self.profiler is not None:
            self._stop()
        if self.num_steps <= self.num_skipped and self.rank == 0:
            log.warning(
                "profile.steps=[%d,%d]: this process made only %d steps and recorded none",
                *(self.num_skipped, self.num_recorded, self.num_steps),
            )
        super().end()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        if not self.is_compiled:
            before = self.model.register_forward_pre_hook(self._before_forward)
            after = self.model.register_forward_hook(self._after_forward)
            self.hooks.callback(before.remove)
            self.hooks.callback(after.remove)
        self.profiler = profile(activities=activities)
        self.profiler.start()
        self.lap("profile")

    def _before_forward(self, model: nn.Module, *_: Any) -> None:
        # DataParallel calls copies of the model in threads.
        if model.training and threading.current_thread() is threading.main_thread():
            self.phase("forward")

    def _after_forward(self, model: nn.Module, *_: Any) -> None:
        if model.training and threading.current_thread() is threading.main_thread():
            self.phase("loss and backward")

    def _stop(self) -> None:
        """Write the trace; the time for that counts as `profile`."""
        assert self.profiler is not None
        self.range.close()
        self.hooks.close()
        self.lap("compute")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.profiler.stop()
        if self.num_steps > self.num_skipped:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.path))
            log.info(
                "profile.steps: open %s, a trace of %d steps, in https://ui.perfetto.dev",
                *(self.path, self.num_steps - self.num_skipped),
            )
        self.profiler = None
        self.lap("profile")
