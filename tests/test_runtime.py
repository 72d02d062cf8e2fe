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
from tests.helpers import (
    Operations,
    make_config,
    scalars_of,
    signal_handlers_restored,
    summary_of,
)


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

    def make_run(
        *overrides: str, group=None, clock=float, device: str = "cpu", **parts: Any
    ) -> Run:
        group = group or ProcessGroup()
        cfg = make_config("loader=synthetic", f"output_dir={tmp_path}", *overrides)
        loader, _ = build_loaders(cfg, torch.device("cpu"), group.rank, group.world_size)
        model = nn.Linear(1, 1)
        optimizer, scheduler = build_optimizer(cfg, model, len(loader))
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        return Run(cfg, torch.device(device), state | parts, group, clock)

    with signal_handlers_restored():
        yield make_run


def test_a_part_of_ones_own_cannot_take_a_name_that_checkpoints_need(run_of) -> None:
    with pytest.raises(ValueError, match="step"):
        run_of(step=nn.Linear(1, 1))


@pytest.mark.parametrize(("device", "most"), [("cpu", 2), ("meta", 2)])
def test_a_step_costs_a_few_operations_whatever_the_number_of_layers(device, most, run_of) -> None:
    """Beyond forward, backward, norm, optimizer and log points. Tensors on the meta device stand
    for those of a GPU: they have no values, so that a step which looks at one, and thus waits for
    it, fails."""
    counts = []
    for num_layers in (1, 40):
        layers = nn.Sequential(*(nn.BatchNorm2d(3, device=device) for _ in range(num_layers)))
        run = run_of("log.images=0", "overwrite=true", device=device, model=layers)
        loss, norm = torch.ones(2, device=device)
        batches = iter(run.batches(run.loader))
        with Operations() as operations:
            for _ in range(3):
                next(batches)
                run.step(loss, norm)
                counts.append(operations.num_calls)
                operations.num_calls = 0
    assert max(counts) <= most, counts


def test_writing_of_logs_and_checkpoints_is_no_part_of_the_steps(run_of) -> None:
    now = 0.0

    def write(*_: Any) -> None:
        nonlocal now
        now += 100

    run = run_of("max_steps=3", "checkpoint.every_steps=2", clock=lambda: now)
    run.recorder.loggers, run.writer = Mock(**{"log.side_effect": write}), Mock()
    run.writer.wait, run.writer.is_time.return_value = write, False
    for _ in run.batches(run.loader):
        now += 1
        run.step(torch.zeros(()), torch.zeros(()))
    task = build_task(run.cfg, run.loader)
    run.epoch(task, torch.ones(task.num_sums, dtype=torch.float64))
    run.finish()
    phases = "first_step", "data_wait", "compute", "saving"
    seconds = {name: run.timing.seconds[name] for name in phases}
    assert seconds == {"first_step": 1, "data_wait": 0, "compute": 2, "saving": 200}


@pytest.mark.parametrize(("asked", "expected"), [(1, 1), (99, 16)])
def test_a_validation_shows_as_many_pictures_as_are_asked_for(asked, expected, run_of) -> None:
    run = run_of(f"log.images={asked}", "log.to=[]")
    task = Mock(wraps=build_task(run.cfg, run.loader))
    shown = torch.rand(16, 1, 8, 8), torch.rand(16, 10), torch.arange(16) % 10
    run.recorder.log_pictures(task, task.sums(*shown[1:]), shown, 1)
    [given] = task.visualize.call_args_list
    assert [len(values) for values in given.args] == 3 * [expected]


@pytest.mark.parametrize(
    ("group", "every_steps", "expected"),
    [
        (ProcessGroup, "null", [3, 6, 9]),
        (FirstOfTwo, "null", [4, 8, 11]),
        (FirstOfTwo, 3, [3, 6, 9]),
    ],
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


def test_a_run_that_was_killed_between_two_log_points_logs_the_mean_of_all_steps(
    run_of, tmp_path
) -> None:
    options = ["log.every_steps=5", "log.images=0", "max_steps=10", "resume=auto"]
    for steps in (range(1, 8), range(8, 11)):
        run = run_of(*options, "checkpoint.every_steps=7")
        run.resume()
        for step, _ in zip(steps, run.batches(run.loader), strict=False):
            run.step(torch.tensor(float(step)), torch.zeros(()))
        run.writer.wait()
        run.recorder.loggers.close()
    assert dict(scalars_of(tmp_path, "train/loss")) == {5: 3.0, 10: 8.0}
    assert run.recorder.epoch_loss_sum == sum(range(11))


def test_at_the_end_of_an_epoch_the_mean_loss_of_its_steps_is_beside_that_of_the_last_ones(
    run_of, tmp_path
) -> None:
    run = run_of("log.every_steps=5", "log.images=0", "max_steps=12", "log.to=[csv,tensorboard]")
    for step, _ in enumerate(run.batches(run.loader), 1):
        run.step(torch.tensor(float(step)), torch.zeros(()))
    task = build_task(run.cfg, run.loader)
    run.epoch(task, torch.ones(task.num_sums, dtype=torch.float64))
    run.finish()
    assert scalars_of(tmp_path, "train/loss") == [(5, 3.0), (10, 8.0), (12, 11.5)]
    assert scalars_of(tmp_path, "train/epoch_loss") == [(12, 6.5)]
    assert "12,train/epoch_loss,6.5" in (tmp_path / "metrics.csv").read_text().splitlines()


def test_of_validations_with_the_same_best_metric_that_with_the_lowest_loss_is_kept() -> None:
    progress, loader = Progress(), MagicMock(epoch=0, batches_done=0)
    task = Mock(best_metric="top1", best_mode="max")
    tops, losses = (0.9, 1.0, 1.0, 1.0, 0.9), (0.1, 0.3, 0.2, 0.2, 0.1)
    rows = [{"val/top1": top, "val/loss": loss} for top, loss in zip(tops, losses, strict=True)]
    is_best = [progress.add(task, metrics, step, loader) for step, metrics in enumerate(rows)]
    assert is_best == [True, True, True, False, False]
    assert progress.best_metrics == rows[2]
    assert progress.epochs_without_best == 3  # a lower loss is no better epoch


@pytest.mark.parametrize(
    ("options", "total", "left"),
    [
        (["epochs=3"], 30, ["0:25:00", "0:20:00"]),
        (["epochs=3", "max_steps=14"], 14, ["0:09:00", "0:04:00"]),
        (["epochs=200"], 2000, ["33:15:00", "33:10:00"]),
    ],
)
def test_a_line_of_progress_has_the_steps_of_the_whole_run_and_the_time_left(
    options, total: int, left: list[str], run_of, caplog
) -> None:
    """Of a minute each; the run is stopped in step 7 and resumed."""
    caplog.set_level("INFO")
    clock = Mock(return_value=0.0)
    options += ["global_batch_size=1000", "log.every_steps=5", "log.images=0", "resume=auto"]
    for steps in (range(1, 8), range(8, 11)):
        run = run_of(*options, "checkpoint.every_steps=7", clock=clock)
        run.resume()
        for _, _ in zip(steps, run.batches(run.loader), strict=False):
            clock.return_value += 60
            run.step(torch.zeros(()), torch.zeros(()))
        run.writer.wait()
        run.recorder.loggers.close()
    lines = re.findall(r"step (\d+) of (\d+): .*, (\d+:\d\d:\d\d) left", caplog.text)
    assert lines == [("5", f"{total}", left[0]), ("10", f"{total}", left[1])]


@pytest.mark.parametrize(
    ("columns", "has_speed", "has_cause"),
    [(60, False, False), (80, True, False), (120, True, True)],
)
def test_the_progress_bar_and_what_it_says_fit_into_a_terminal(
    columns: int, has_speed: bool, has_cause: bool, run_of, monkeypatch
) -> None:
    """At 12,800 samples/s, in an epoch of 156 steps, of 90."""
    now = 0.0
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(end, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        run = run_of("epochs=90", "max_steps=120", "log.images=0", clock=lambda: now)
        for _ in run.batches(run.loader):
            now += 0.005
            run.step(torch.tensor(12.3456), torch.zeros(()))
            if run.step_number == 120:
                run.recorder.bar.refresh()
        run.recorder.loggers.close()
    written = b""
    with suppress(OSError):  # at the end
        while True:
            written += os.read(terminal, 1 << 16)
    os.close(terminal)
    frames = written.decode().rstrip("\r ").split("\r")
    assert all(len(frame) < columns for frame in frames)
    before, bar, after = frames[-1].split("|")
    assert len(bar) >= 5
    assert before.startswith("epoch 1/90")
    assert "120/156" in after
    assert "loss 12.3456" in after
    assert after.endswith("]")  # it is not cut
    assert ("12800 samples/s" in after) == has_speed
    assert ("-bound" in after) == has_cause


def test_a_run_logs_how_busy_its_gpu_is_and_says_what_limits_it(run_of, tmp_path, caplog) -> None:
    run = run_of("log.to=[csv]", "log.every_steps=2", "max_steps=4", "log.images=0")
    busy = {"perf/gpu_utilization": 0.5, "perf/peak_memory_gib": 2.0}
    run.recorder.speed.gpu = Mock(**{"values.return_value": busy})
    with caplog.at_level("INFO"):
        for _ in run.batches(run.loader):
            run.step(torch.zeros(()), torch.zeros(()))
        run.finish()
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {f"{step},{key},{value}" for step in (2, 4) for key, value in busy.items()} < set(rows)
    assert busy.items() <= summary_of(tmp_path).items()
    assert caplog.text.count("host-bound") == 3, caplog.text  # at two log points and at the end
