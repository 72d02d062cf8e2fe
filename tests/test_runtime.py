"""Parts of `runtime/` by themselves."""

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import nn

from conf.errors import UserError
from loaders import build_loaders
from models.pretrained import read_weights
from runtime import Run, build_optimizer, preemption
from runtime.process_group import ProcessGroup
from runtime.progress import Progress
from runtime.setup import resolve_device, set_numerics, setup
from tasks import build_task
from tests.helpers import make_config, refused
from tests.processes import signal_handlers_restored

ZERO = torch.zeros(())


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
        cfg = make_config("loader=synthetic", f"output_dir={tmp_path}", "log.images=0", *overrides)
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
    clock = Mock(return_value=0.0)

    def write(*_: Any) -> None:
        clock.return_value += 100

    run = run_of("max_steps=3", "checkpoint.every_steps=2", clock=clock)
    run.report.loggers, run.writer = Mock(**{"log.side_effect": write}), Mock()
    run.writer.wait, run.writer.is_time.return_value = write, False
    for _ in run.epochs():
        for _ in run.batches(run.loader):
            clock.return_value += 1
            run.step(ZERO, ZERO)
    task = build_task(run.cfg, run.loader)
    run.epoch(task, torch.ones(task.num_sums, dtype=torch.float64))
    run.finish()
    expected = {"first_step": 1, "data_wait": 0, "compute": 2, "saving": 200}
    assert expected.items() <= run.timer.seconds.items()


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


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_run_that_has_ended_has_nothing_to_do_and_asks_for_no_other_start(
    run_of, monkeypatch, tmp_path
) -> None:
    """Nothing to trace either; the signal comes while its loggers end."""
    for name in ("_signal", "_run_dir", "_torchrun"):
        monkeypatch.setattr(preemption, name, None)
    options = ["max_steps=1", "resume=auto"]
    for number, more in enumerate([[], ["profile.steps=[0,5]"]]):
        run = run_of(*options, *more)
        preemption.start(tmp_path)
        run.resume()
        task = build_task(run.cfg, run.loader)
        for _ in run.epochs():
            assert number == 0
            for _ in run.batches(run.loader):
                run.step(ZERO, ZERO)
            run.epoch(task, torch.ones(task.num_sums, dtype=torch.float64))
        if number == 1:
            preemption.listen()
            run.report.close = lambda progress: os.kill(os.getpid(), signal.SIGUSR1)
        run.finish()
    assert preemption.is_requested()
    assert not (tmp_path / preemption.REQUEUE_MARKER).exists()


def test_of_validations_with_the_same_best_metric_that_with_the_lowest_loss_is_kept() -> None:
    progress, loader = Progress(), MagicMock(epoch=0, batches_done=0)
    task = Mock(best_metric="top1", best_mode="max")
    rows = [(0.9, 0.1, True), (1.0, 0.3, True), (1.0, 0.2, True), (1.0, 0.2, False)]
    for step, (top1, loss, is_best) in enumerate([*rows, (0.9, 0.1, False)]):
        metrics = {"val/top1": top1, "val/loss": loss}
        assert progress.add(task, metrics, step, loader) == is_best
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
        next(run.epochs())
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
        run = run_of("epochs=90", "max_steps=120", clock=clock)
        for _ in run.batches(run.loader):
            clock.return_value += 0.005
            run.step(torch.tensor(12.3456), ZERO)
            if run.step_number == 120:
                run.report.bar.refresh()
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


@pytest.fixture
def numerics_restored() -> Iterator[None]:
    yield
    set_numerics(make_config())


@pytest.mark.usefixtures("numerics_restored")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("null", (False, True)), ("ieee", (False, False)), ("tf32", (True, True))],
)
def test_one_key_chooses_what_cuda_computes_float32_in(chosen, expected) -> None:
    """The older names of torch.backends stay readable, which torch.compile reads."""
    set_numerics(make_config(f"fp32_precision={chosen}"))
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert (matmul.allow_tf32, cudnn.allow_tf32) == expected
    names = matmul.fp32_precision, cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    assert tuple(name == "tf32" for name in names) == expected


@pytest.mark.usefixtures("numerics_restored")
def test_deterministic_refuses_what_has_no_deterministic_algorithm(monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_numerics(make_config("deterministic=true"))
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    set_numerics(make_config())
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    set_numerics(make_config("cudnn_benchmark=false"))
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(("num_cpus", "given", "expected"), [(1, "", 1), (8, "", 3), (1, "3", 3)])
def test_torch_has_no_more_threads_than_cpus_unless_it_is_told_to(
    num_cpus, given, expected, monkeypatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cpus)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    torch.set_num_threads(3)
    setup(make_config("device=cpu"))
    assert torch.get_num_threads() == expected
    torch.set_num_threads(before)


def test_ranks_of_a_machine_do_not_share_a_gpu(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with refused("device=cuda:1 ", "device=cuda,"):
        resolve_device("cuda:1", 1)


def test_a_gpu_that_torch_cannot_use_ends_the_run_unless_it_is_hidden(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = import_module("runtime.setup")  # its name in `runtime` is that of a function
    monkeypatch.setattr(module, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto").type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert resolve_device("cpu").type == "cpu"
    with refused("NVIDIA driver", torch.__version__, "device=cpu"):
        resolve_device("auto")
    monkeypatch.setattr(module, "NVIDIA_DRIVER", tmp_path / "none")
    assert resolve_device("auto").type == "cpu"
