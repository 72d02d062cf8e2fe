"""Parts of `runtime/` by themselves."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise, repeat
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loaders import build_loaders
from runtime.distributed import convert_sync_batchnorm
from runtime.ema import EMA
from runtime.gpu_monitor import GpuMonitor
from runtime.group import SingleProcess
from runtime.guard import NonFiniteGuard
from runtime.parallel import visible_gpus
from runtime.setup import resolve_device, set_numerics
from runtime.timing import Timing, verdict
from runtime.training import Run, build_optimizer
from tasks import build_task
from tests.helpers import (
    checkpoint_of,
    make_config,
    refused,
    scalars_of,
    signal_handlers_restored,
    summary_of,
    wait_for,
)

GPU = "perf/gpu_utilization"


def test_the_guard_does_not_wait_for_a_device() -> None:
    """Tensors on the meta device have no values, so that looking at one fails."""
    cfg = make_config("loader=synthetic")
    loader, _ = build_loaders(cfg, torch.device("cpu"))
    model = nn.BatchNorm2d(3, device="meta")
    optimizer = torch.optim.SGD(model.parameters())
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["fused"] = True  # which torch refuses on this device
    guard = NonFiniteGuard(cfg, model, loader)
    guard.step(optimizer, torch.empty((), device="meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        guard.settle()


class FirstOfTwo(SingleProcess):
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
        group = group or SingleProcess()
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


class Operations(TorchDispatchMode):
    """Counts the operations of torch, each of which is a launch on a GPU."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += not func.is_view
        return func(*args, **(kwargs or {}))


# part: synthetic
@pytest.mark.parametrize(("device", "most"), [("cpu", 9), ("meta", 15)])
def test_a_step_costs_a_few_operations_whatever_the_number_of_layers(device, most, run_of) -> None:
    """Beyond forward, backward, norm and optimizer. Tensors on the meta device stand for those of a
    GPU: they have no values, so that a step which looks at one, and thus waits for it, fails."""
    counts = []
    for num_layers in (1, 40):
        layers = nn.Sequential(*(nn.BatchNorm2d(3, device=device) for _ in range(num_layers)))
        run = run_of("log.images=0", "overwrite=true", device=device, model=layers)
        loss, norm = torch.ones(2, device=device)
        scaler, batches = torch.amp.GradScaler("cpu"), iter(run.batches(run.loader))
        scaler.step = Mock()  # type: ignore[method-assign]
        with Operations() as operations:
            for _ in range(3):
                next(batches)
                run.guard.step(run.state["optimizer"], norm, scaler)
                run.step(loss, norm)
                counts.append(operations.num_calls)
                operations.num_calls = 0
    others = [
        count for number, count in enumerate(counts) if number % 3
    ]  # then the scaler has its own
    assert max(others) <= most, counts


def test_writing_of_logs_and_checkpoints_is_no_part_of_the_steps(run_of) -> None:
    """TensorBoard's thread takes the interpreter's lock, until all is written."""
    now = 0.0

    def flush() -> None:
        nonlocal now
        now += 100

    run = run_of("max_steps=3", "checkpoint.every_steps=2", clock=lambda: now)
    run.recorder.loggers = Mock(**{"flush.side_effect": flush})
    for _ in run.batches(run.loader):
        now += 1
        run.step(torch.zeros(()), torch.zeros(()))
    task = build_task(run.cfg, run.loader)
    run.epoch(task, torch.ones(task.num_sums, dtype=torch.float64))
    run.finish()
    seconds = {name: run.timing.seconds[name] for name in ("first_step", "compute", "saving")}
    assert seconds == {"first_step": 101, "compute": 2, "saving": 200}


def test_an_average_follows_all_layers_in_a_few_operations() -> None:  # part: ema
    for num_layers in (1, 40):
        model = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(num_layers)))
        average = EMA(model, 0.9)
        model(torch.rand(2, 3, 4, 4))
        with Operations() as operations:
            average.update(model)
        assert operations.num_calls <= 6
        counted = [v for k, v in average.weights().items() if k.endswith("tracked")]
        assert [*map(int, counted)] == [1] * num_layers


@pytest.mark.parametrize(("asked", "expected"), [(1, 1), (99, 16)])
def test_a_validation_shows_as_many_pictures_as_are_asked_for(asked, expected, run_of) -> None:
    run = run_of(f"log.images={asked}")
    task = Mock(wraps=build_task(run.cfg, run.loader))
    inputs, outputs, targets = torch.rand(1, 1, 8, 8), torch.rand(1, 10), torch.tensor([3])
    shown = 16 * [(inputs, outputs, targets)]
    run.recorder.log_pictures(task, task.sums(outputs, targets), shown, 1)
    assert task.visualize.call_count == expected


def test_the_inputs_of_the_training_are_shown_with_their_targets(run_of) -> None:
    run = run_of("log.images=3")
    run.recorder.loggers = Mock()
    for labels in (torch.tensor([3, 1, -100, 1]), torch.eye(10)[:4] * 0.7):  # as MixUp makes them
        run.recorder.log_inputs((torch.zeros(4, 1, 8, 8), labels), 1)
        [images] = run.recorder.loggers.log.call_args.args[0].values()
        assert images.shape[:2] == (3, 3)
        assert (images[:, :, 96:].amax(dim=(1, 2, 3)) > 0.5).all()  # text below each
    for others in ({"boxes": labels}, torch.zeros(4, 3)):
        run.recorder.log_inputs((torch.zeros(4, 1, 8, 8), others), 1)
        [images] = run.recorder.loggers.log.call_args.args[0].values()
        assert images.shape == (3, 1, 8, 8)


@pytest.mark.parametrize(
    ("group", "every_steps", "expected"),
    [
        (SingleProcess, "null", [3, 6, 9]),
        (FirstOfTwo, "null", [4, 8, 11]),
        (FirstOfTwo, 3, [3, 6, 9]),
    ],
)
def test_the_clock_of_one_rank_asks_once_for_each_save(
    group: type[SingleProcess], every_steps, expected: list[int], run_of, tmp_path
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
    saved = {path.stem for path in tmp_path.glob("checkpoints/step-*.pt")}
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


class Told:
    """A task whose metrics are told."""

    best_metric, best_mode = "top1", "max"

    def __init__(self, **metrics: float) -> None:
        self.told = metrics

    def metrics(self, totals: Any) -> dict[str, float]:
        return self.told


def test_of_epochs_with_the_same_best_metric_that_with_the_lowest_loss_is_kept(
    run_of, tmp_path, caplog
) -> None:
    caplog.set_level("INFO")
    run = run_of("early_stopping.patience=3", "log.images=0", "epochs=9")
    tops, losses = (0.9, 1.0, 1.0, 1.0, 0.9), (0.1, 0.3, 0.2, 0.2, 0.1)
    for epoch, (top1, loss) in zip(run.epochs(), zip(tops, losses, strict=True), strict=False):
        run.loader.set_epoch(epoch)
        run.epoch(Told(loss=loss, top1=top1), torch.zeros(()))
    run.finish()
    assert run.writer.best.metrics == {"val/loss": 0.2, "val/top1": 1.0}
    assert checkpoint_of(tmp_path, "best.pt")["loader"]["epoch"] == 2
    # A lower loss is no better epoch.
    assert "early stopping: no better val/top1 since epoch" in caplog.text
    assert summary_of(tmp_path)["val/loss"] == 0.1


def test_lines_of_progress_are_evenly_spaced_and_become_rarer(run_of, caplog) -> None:
    caplog.set_level("INFO")
    run = run_of("log.every_steps=2", "log.images=0", "max_steps=20")
    for _ in run.batches(run.loader):
        run.step(torch.zeros(()), torch.zeros(()))
    run.recorder.loggers.close()
    lines = [line.getMessage() for line in caplog.records]
    steps = [int(line.split()[1][:-1]) for line in lines if line.startswith("step ")]
    assert steps[0] == 2
    assert len(steps) < 10
    assert all(step % (step - before) == 0 for before, step in pairwise(steps))


def test_a_gpu_waits_for_data_while_it_has_nothing_to_do() -> None:
    """The host is ahead: it waits for batches and launches work while the device works or waits."""
    now, on_device = 0.0, 0.0

    class Event:
        def __init__(self) -> None:
            self.ms = 1000 * on_device

        def elapsed_time(self, end: "Event") -> float:
            return end.ms - self.ms

    times = Timing(torch.device("cpu"), lambda: now, lambda _: Event())
    with times.data_wait():
        now += 100
    times.end_step()  # the first one
    for _ in range(3):
        with times.data_wait():
            now += 5.0
            on_device += 0.5
        times.count_images(8)
        now += 1.0
        times.end_step()
    now += 6.0  # until the device has finished, too
    times.finished()
    assert times.seconds["data_wait"] == pytest.approx(1.5)
    assert times.seconds["compute"] == pytest.approx(22.5)
    assert (times.images_per_s, times.data_wait_share) == (1.0, 0.0625)


@pytest.fixture(autouse=True)
def _numerics_restored() -> Iterator[None]:
    yield
    set_numerics(make_config())


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


def test_a_gpu_that_cannot_be_used_ends_the_run_unless_it_is_hidden(monkeypatch, tmp_path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert not torch.cuda.is_available()  # which is known from now on
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto", driver=driver).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert resolve_device("cpu", driver=driver).type == "cpu"
    with refused("535.104.05", "device=cpu", str(torch.version.cuda)):
        resolve_device("auto", driver=driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with refused("535.104.05"):
        resolve_device("auto", driver=driver)


def test_data_parallel_gathers_on_the_configured_gpu() -> None:
    assert visible_gpus(make_config(), torch.device("cuda", 1), num_gpus=3) == [1, 0, 2]


def test_sync_batchnorm_is_a_choice() -> None:
    for wanted in (True, False):
        cfg = make_config(f"distributed.sync_batchnorm={wanted}")
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        converted = convert_sync_batchnorm(cfg, model, torch.device("cuda"))
        assert isinstance(converted.get_submodule("1"), nn.SyncBatchNorm) == wanted


def test_a_gpu_is_watched_while_steps_are_made() -> None:
    read = chain([0, 20], repeat(60)).__next__  # once at first
    monitor = GpuMonitor(torch.device("cuda", 3), lambda device: float(read()))
    assert monitor.values().keys() == {"perf/peak_memory_gib"}
    for _ in range(2):
        monitor.start()
    wait_for(lambda: monitor.num_samples == 2, "two samples")
    monitor.stop()
    assert monitor.values()["perf/gpu_utilization"] == 0.4


def test_without_a_gpu_that_can_be_read_nothing_is_watched() -> None:
    for name, keys in {"cpu": set(), "cuda:0": {"perf/peak_memory_gib"}}.items():
        monitor = GpuMonitor(torch.device(name), Mock(side_effect=ModuleNotFoundError))
        monitor.start()
        assert monitor.stopped is None
        assert monitor.values().keys() == keys


def test_a_run_logs_how_busy_its_gpu_is_and_says_what_limits_it(run_of, tmp_path, caplog) -> None:
    run = run_of("log.to=[csv]", "log.every_steps=2", "max_steps=4", "log.images=0")
    busy = {"perf/gpu_utilization": 0.5, "perf/peak_memory_gib": 2.0}
    run.recorder.gpu = Mock(**{"values.return_value": busy})
    with caplog.at_level("INFO"):
        for _ in run.batches(run.loader):
            run.step(torch.zeros(()), torch.zeros(()))
        run.finish()
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {f"{step},{key},{value}" for step in (2, 4) for key, value in busy.items()} < set(rows)
    assert busy.items() <= summary_of(tmp_path).items()
    assert caplog.text.count("host-bound") == 3, caplog.text  # at two log points and at the end


# part: dali packed tune
@pytest.mark.parametrize(
    ("waits", "busy", "device", "settings", "expected", "advice"),
    [
        (0.19, None, "cpu", [], "compute", set()),
        (0.19, 0.8, "cuda", [], "compute", set()),
        (0.0, 0.79, "cuda", [], "host", {"num_workers=auto", "dali", "packed", "compile", "batch"}),
        (0.0, 0.0, "cuda", ["loader=synthetic", "model.compile=true"], "host", {"batch"}),
        (0.2, 0.3, "cuda", [], "input", {"num_workers=auto", "dali", "packed"}),
        (0.5, None, "cuda", ["loader=dali", "loader.num_workers=auto"], "input", {"packed"}),
        (0.5, None, "cpu", [], "input", {"num_workers=auto", "packed"}),
        (0.5, None, "cuda", ["data=mnist_mini"], "input", {"num_workers=auto"}),  # in memory
    ],
)
def test_a_verdict_names_what_may_help_and_is_not_yet_used(
    waits, busy, device, settings, expected, advice
) -> None:
    speeds = {"perf/data_wait_share": waits} | ({} if busy is None else {GPU: busy})
    cfg = make_config("data=imagefolder", "data.root=photos", *settings)
    kind, _, tried = verdict(speeds, cfg, torch.device(device)).partition("-bound")
    words = {"num_workers=auto", "dali", "packed", "compile", "batch"}
    assert (kind, {word for word in words if word in tried}) == (expected, advice)
