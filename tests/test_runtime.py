"""Parts of `runtime/` by themselves."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from conf.errors import UserError
from loaders import build_loaders
from runtime import Run, build_optimizer, run_main
from runtime.checkpoint_files import read_weights
from runtime.process_group import ProcessGroup
from runtime.progress import Progress
from tasks import build_task
from tests.helpers import make_config
from tests.processes import signal_handlers_restored
from tests.results import summary_of

ZERO = torch.zeros(())


class FirstOfTwo(ProcessGroup):
    """Its answers come a step late."""

    world_size = 2
    request = 0

    def agree(self, request: int) -> int:
        answer, self.request = self.request, request
        return answer

    def pending_request(self) -> int:
        return self.agree(0)


@pytest.fixture
def run_of(tmp_path) -> Iterator[Callable[..., Run]]:
    """Function that makes a run in `tmp_path` on synthetic data; signals' handlers are restored."""

    def make_run(*overrides: str, group=None, clock=float, **parts: Any) -> Run:
        group = group or ProcessGroup()
        cfg = make_config("loader=synthetic", f"output_dir={tmp_path}", "log.images=0", *overrides)
        loader, _ = build_loaders(cfg, torch.device("cpu"), group.rank, group.world_size)
        model = nn.Linear(1, 1)
        optimizer, scheduler = build_optimizer(cfg, model, len(loader))
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        return Run(cfg, torch.device("cpu"), state | parts, group, clock)

    with signal_handlers_restored():
        yield make_run


def test_a_run_has_one_name_however_often_it_is_read(monkeypatch) -> None:
    """It is that of the folder, and of the run in logging services."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    read = OmegaConf.create({"folder": "${run_stamp:}", "name": "${run_stamp:}"})
    with signal_handlers_restored():
        run_main(lambda: None)
    assert read.folder == read.name


def test_a_part_of_ones_own_cannot_take_a_name_that_checkpoints_need(run_of) -> None:
    with pytest.raises(ValueError, match="step"):
        run_of(step=nn.Linear(1, 1))


def test_writing_of_logs_and_checkpoints_is_no_part_of_the_steps(run_of, tmp_path, caplog) -> None:
    """The end of a run names the slowest rank, too."""
    caplog.set_level("INFO")
    clock = Mock(return_value=0.0)

    def write(*_: Any) -> None:
        clock.return_value += 100

    run = run_of("max_steps=3", "checkpoint.every_steps=2", clock=clock)
    run.report.classes = {"slow": Mock(**{"return_value.log.side_effect": write})}
    run.writer, run.timer.watch = Mock(wait=write), Mock()
    for _ in run.epochs():
        for _ in run.batches(run.loader):
            clock.return_value += 1
            run.step(ZERO, ZERO)
    task = build_task(run.cfg, run.loader)
    run.epoch(task, torch.ones(task.num_sums, dtype=torch.float64))
    run.timer.watch.assert_called_once_with(run.state["model"])
    assert run.timer.group is run.group  # whose ranks are compared
    run.timer.slow = {"rank": 1, "host": "a", "slower_by": 0.5}
    run.finish()
    expected = {"first_step": 1, "data_wait": 0, "compute": 2, "saving": 200}
    assert expected.items() <= run.timer.seconds.items()
    assert summary_of(tmp_path)["slowest_rank"] == run.timer.slow
    assert "rank 1 on a, 50% slower" in caplog.text


@pytest.mark.parametrize(
    ("group", "expected"), [(ProcessGroup, [3, 6, 9]), (FirstOfTwo, [4, 8, 11])]
)
def test_the_clock_of_one_rank_asks_once_for_each_save(
    group: type[ProcessGroup], expected: list[int], run_of, tmp_path
) -> None:
    """Every three steps here, the last time in the last step."""
    clock = Mock(return_value=0.0)
    options = ["checkpoint.every_minutes=3", "checkpoint.keep=99", "max_steps=11"]
    run = run_of(*options, group=group(), clock=clock)
    for _ in run.batches(run.loader):
        clock.return_value += 60
        run.step(ZERO, ZERO)
    run.finish()
    saved = {path.name for path in tmp_path.glob("checkpoints/step-*")}
    assert saved == {f"step-{step:08d}" for step in expected}


@pytest.mark.parametrize("keeps_best", [True, False])
def test_averaged_weights_are_those_to_use(keeps_best: bool, run_of, tmp_path) -> None:
    run = run_of(f"checkpoint.best={keeps_best}")
    run.weights = lambda: {"weight": torch.full((1, 1), 7.0)}
    task = build_task(run.cfg, run.loader)
    run.epoch(task, torch.ones(task.num_sums, dtype=torch.float64))
    run.writer.wait()
    weights, _ = read_weights(str(tmp_path))
    assert weights["weight"].item() == 7


@pytest.mark.parametrize("error", [None, OSError, SystemExit, KeyboardInterrupt])
def test_loggers_are_closed_however_a_run_ends(error, run_of) -> None:
    run, logger = run_of("max_steps=1"), Mock()
    run.report.classes = {"mine": Mock(return_value=logger)}
    with suppress(OSError, SystemExit, KeyboardInterrupt):
        for _ in run.epochs():
            for _ in run.batches(run.loader):
                run.step(ZERO, ZERO)
            if error is not None:
                raise error
    logger.close.assert_called_once_with(error is None)


def test_of_validations_with_the_same_best_metric_that_with_the_lowest_loss_is_kept() -> None:
    progress = Progress()
    task = Mock(best_metric="top1", best_mode="max")
    rows = [(0.9, 0.1, True), (1.0, 0.3, True), (1.0, 0.2, True), (1.0, 0.2, False)]
    for step, (top1, loss, is_best) in enumerate([*rows, (0.9, 0.1, False)]):
        metrics = {"val/top1": top1, "val/loss": loss}
        assert progress.add(task, metrics, step, 1) == is_best
    assert progress.best_metrics == {"val/top1": 1.0, "val/loss": 0.2}
    assert progress.epochs_without_best == 3  # a lower loss is no better epoch


def test_a_line_of_progress_has_the_steps_of_the_whole_run_and_the_time_left(
    run_of, tmp_path, caplog
) -> None:
    """Of a minute each, and of a run that was stopped in step 7."""
    caplog.set_level("INFO")
    clock = Mock(return_value=0.0)
    options = ["epochs=3", "max_steps=14", "global_batch_size=1000", "log.every_steps=5"]
    options += ["log.to=[csv]", "resume=auto", "checkpoint.every_steps=7"]
    for steps in (range(1, 8), range(8, 11)):
        run = run_of(*options, clock=clock)
        run.resume()
        epochs = run.epochs()
        next(epochs)
        for step, _ in zip(steps, run.batches(run.loader), strict=False):
            clock.return_value += 60
            run.step(torch.tensor(float(step)), ZERO)
        run.writer.wait()
    lines = re.findall(r"step (\d+) of (\d+): .*, (\d+:\d\d:\d\d) left", caplog.text)
    assert lines == [("5", "14", "0:09:00"), ("10", "14", "0:04:00")]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {"5,train/loss,3.0", "10,train/loss,9.0"} < set(rows)  # of the steps of each process


@pytest.mark.parametrize("has_files", [True, False])
def test_only_samples_that_are_files_can_be_left_out(has_files, run_of, tmp_path) -> None:
    """Of which names may be no UTF-8."""
    run = run_of("global_batch_size=2")
    assert not run.loader.info.has_files
    run.loader.info.has_files, run.loader.info.name_of = has_files, "\udcff {}".format
    for _ in run.batches(run.loader):
        run.record_micro_batch(torch.tensor(torch.nan))
        break
    with pytest.raises(UserError, match="optimizer.lr") as raised:
        run.finite.check({"weight": torch.tensor(torch.nan)})
    assert ("data.leave_out" in str(raised.value)) == has_files
    assert (tmp_path / "suspects.txt").read_bytes().startswith(b"\xff ")


def test_on_a_terminal_a_bar_takes_the_place_of_lines(run_of, monkeypatch, caplog) -> None:
    """At 12,800 samples/s, in an epoch of 156 steps, of 90."""
    clock, columns = Mock(return_value=0.0), 80
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(end, "w", encoding="utf-8") as stderr, caplog.at_level("INFO"):
        monkeypatch.setattr(sys, "stderr", stderr)
        run = run_of("epochs=90", "max_steps=20", clock=clock)
        for _ in run.batches(run.loader):
            clock.return_value += 0.005
            run.step(torch.tensor(12.3456), ZERO)
            if run.step_number == 20:
                run.report.bar.refresh()
    frames = os.read(terminal, 1 << 16).decode().rstrip("\r ").split("\r")
    assert all(len(frame) < columns for frame in frames)
    for shown in ("epoch 1/90", "20/156", "loss 12.3456, 12800 samples/s]"):
        assert shown in frames[-1]
    assert "step 20 of" not in caplog.text
