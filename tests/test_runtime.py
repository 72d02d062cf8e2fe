"""Parts of `runtime/` by themselves."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import nn

from loaders import build_loaders
from runtime import Run, build_optimizer
from runtime.process_group import ProcessGroup
from runtime.progress import Progress
from tasks import build_task
from tests.helpers import make_config
from tests.processes import signal_handlers_restored


class FirstOfTwo(ProcessGroup):
    """Its answers come a step late."""

    world_size = 2
    flags: Sequence[bool] = ()

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        answer, self.flags = self.flags, flags
        return list(answer)

    def pending_flags(self) -> list[bool]:
        return self.any_rank([])


@pytest.fixture
def run_of(tmp_path) -> Iterator[Callable[..., Run]]:
    """Function that makes a run in `tmp_path` on synthetic data; signals' handlers are restored."""

    def make_run(*overrides: str, group=None, clock=float, **parts: Any) -> Run:
        group = group or ProcessGroup()
        cfg = make_config("loader=synthetic", f"output_dir={tmp_path}", *overrides)
        loader, _ = build_loaders(cfg, torch.device("cpu"), group.rank, group.world_size)
        model = nn.Linear(1, 1)
        optimizer, scheduler = build_optimizer(cfg, model, len(loader))
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        return Run(cfg, torch.device("cpu"), state | parts, group, clock)

    with signal_handlers_restored():
        yield make_run


def test_a_part_of_ones_own_cannot_take_a_name_that_checkpoints_need(run_of) -> None:
    with pytest.raises(ValueError, match="step"):
        run_of(step=nn.Linear(1, 1))


def test_writing_of_logs_and_checkpoints_is_no_part_of_the_steps(run_of) -> None:
    now = 0.0

    def write(*_: Any) -> None:
        nonlocal now
        now += 100

    run = run_of("max_steps=3", "checkpoint.every_steps=2", clock=lambda: now)
    run.metrics.loggers, run.writer = Mock(**{"log.side_effect": write}), Mock()
    run.writer.wait, run.writer.is_time.return_value = write, False
    for _ in run.epochs():
        for _ in run.batches(run.loader):
            now += 1
            run.step(torch.zeros(()), torch.zeros(()))
    task = build_task(run.cfg, run.loader)
    run.epoch(task, torch.ones(task.num_sums, dtype=torch.float64))
    run.finish()
    phases = "first_step", "data_wait", "compute", "saving"
    seconds = {name: run.timer.seconds[name] for name in phases}
    assert seconds == {"first_step": 1, "data_wait": 0, "compute": 2, "saving": 200}


@pytest.mark.parametrize(
    ("group", "every_steps", "expected"),
    [(ProcessGroup, "null", [3, 6, 9]), (FirstOfTwo, "null", [4, 8, 11])],
)
def test_the_clock_of_one_rank_asks_once_for_each_save(
    group: type[ProcessGroup], every_steps, expected: list[int], run_of, tmp_path
) -> None:
    """Every three steps here, the last time in the last step."""
    now = 0.0
    options = [f"checkpoint.every_steps={every_steps}", "checkpoint.keep=99", "log.images=0"]
    options += ["checkpoint.every_minutes=3", "max_steps=11"]
    run = run_of(*options, group=group(), clock=lambda: now)
    for _ in run.batches(run.loader):
        now += 60
        run.step(torch.zeros(()), torch.zeros(()))
    run.finish()
    saved = {path.name for path in tmp_path.glob("checkpoints/step-*")}
    assert saved == {f"step-{step:08d}" for step in expected}


def test_of_validations_with_the_same_best_metric_that_with_the_lowest_loss_is_kept() -> None:
    progress, loader = Progress(), MagicMock(epoch=0, batches_done=0)
    task = Mock(best_metric="top1", best_mode="max")
    tops, losses = (0.9, 1.0, 1.0, 1.0, 0.9), (0.1, 0.3, 0.2, 0.2, 0.1)
    rows = [{"val/top1": top, "val/loss": loss} for top, loss in zip(tops, losses, strict=True)]
    is_best = [progress.add(task, metrics, step, loader) for step, metrics in enumerate(rows)]
    assert is_best == [True, True, True, False, False]
    assert progress.best_metrics == rows[2]
    assert progress.epochs_without_best == 3  # a lower loss is no better epoch


def test_a_line_of_progress_has_the_steps_of_the_whole_run_and_the_time_left(
    run_of, tmp_path, caplog
) -> None:
    """Of a minute each, and of a run that was stopped in step 7."""
    caplog.set_level("INFO")
    clock = Mock(return_value=0.0)
    options = ["epochs=3", "max_steps=14", "global_batch_size=1000", "log.every_steps=5"]
    options += ["log.images=0", "log.to=[csv]", "resume=auto", "checkpoint.every_steps=7"]
    for steps in (range(1, 8), range(8, 11)):
        run = run_of(*options, clock=clock)
        run.resume()
        for _ in run.epochs():
            for step, _ in zip(steps, run.batches(run.loader), strict=False):
                clock.return_value += 60
                run.step(torch.tensor(float(step)), torch.zeros(()))
            break
        run.writer.wait()
    lines = re.findall(r"step (\d+) of (\d+): .*, (\d+:\d\d:\d\d) left", caplog.text)
    assert lines == [("5", "14", "0:09:00"), ("10", "14", "0:04:00")]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {"5,train/loss,3.0", "10,train/loss,9.0"} < set(rows)  # of the steps of each process


def test_on_a_terminal_a_bar_takes_the_place_of_lines(run_of, monkeypatch, caplog) -> None:
    """At 12,800 samples/s, in an epoch of 156 steps, of 90."""
    now, columns = 0.0, 80
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(end, "w", encoding="utf-8") as stderr, caplog.at_level("INFO"):
        monkeypatch.setattr(sys, "stderr", stderr)
        run = run_of("epochs=90", "max_steps=120", "log.images=0", clock=lambda: now)
        for _ in run.batches(run.loader):
            now += 0.005
            run.step(torch.tensor(12.3456), torch.zeros(()))
            if run.step_number == 120:
                run.metrics.bar.refresh()
    written = b""
    with suppress(OSError):  # at the end
        while True:
            written += os.read(terminal, 1 << 16)
    os.close(terminal)
    frames = written.decode().rstrip("\r ").split("\r")
    assert all(len(frame) < columns for frame in frames)
    for shown in ("epoch 1/90", "120/156", "loss 12.3456, 12800 samples/s]"):
        assert shown in frames[-1]
    assert "step 20 of" not in caplog.text
