"""Parts of `runtime/` by themselves."""

import ctypes
import math
import multiprocessing
import platform
import resource
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from loaders import build_loaders
from runtime import logger as logger_module
from runtime.guard import Kept, NonFiniteGuard
from runtime.optimizer import build_optimizer, clip_grad_norm
from runtime.setup import amp_dtype, resolve_device
from tests.helpers import REPOSITORY, make_config

MIB = 1 << 20


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("max_norm", [math.inf, 100.0, 0.01])
def test_gradients_are_clipped_as_pytorch_clips_them(max_norm: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[1:].parameters()}]
    )
    model(torch.randn(8, 5)).square().sum().backward()
    before = gradients(model)
    norm = clip_grad_norm(optimizer, max_norm)
    found = gradients(model)
    for parameter, gradient in zip(
        (*model[0].parameters(), *model[2].parameters()), before, strict=True
    ):
        parameter.grad = gradient
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    torch.testing.assert_close(found, gradients(model))


@pytest.mark.parametrize("warmup_epochs", [0.0, 0.5])
def test_the_schedule_is_that_of_pytorchs_own_parts(warmup_epochs: float) -> None:
    cfg = make_config("epochs=2", f"optimizer.warmup_epochs={warmup_epochs}", "optimizer.lr=0.3")
    optimizer, schedule = build_optimizer(cfg, nn.Linear(1, 1), steps_per_epoch=10)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    warmup_steps = int(10 * warmup_epochs)
    cosine = CosineAnnealingLR(other, 20 - warmup_steps)
    expected: LRScheduler = cosine
    if warmup_steps:
        warmup = LinearLR(other, start_factor=0.01, total_iters=warmup_steps)
        expected = SequentialLR(other, [warmup, cosine], milestones=[warmup_steps])
    for _ in range(20):
        assert schedule.get_last_lr() == pytest.approx(expected.get_last_lr(), abs=1e-12)
        for one, its_schedule in [(optimizer, schedule), (other, expected)]:
            one.step()
            its_schedule.step()
    assert schedule.get_last_lr() == [0]


NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_tensors_are_restored_only_where_the_condition_holds(device: str) -> None:
    tensors = [torch.tensor(1.0, device=device), torch.arange(6.0, device=device).view(2, 3)]
    kept = Kept(tensors)

    def set_all(value: float) -> None:
        for tensor in tensors:
            tensor.fill_(value)

    set_all(float("nan"))
    kept.restore_if(torch.tensor(True, device=device))
    assert tensors[0].item() == 1
    assert tensors[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    set_all(7)
    kept.restore_if(torch.tensor(False, device=device))
    assert all((tensor == 7).all() for tensor in tensors)
    set_all(float("inf"))
    kept.restore_if(torch.tensor(True, device=device))
    assert all((tensor == 7).all() for tensor in tensors)
    set_all(8)
    kept.keep()
    set_all(9)
    kept.restore_if(torch.tensor(True, device=device))
    assert all((tensor == 8).all() for tensor in tensors)


def test_the_guard_does_not_wait_for_a_device() -> None:
    """Tensors on the meta device have no values, so that looking at one fails."""
    cfg = make_config("loader=synthetic", "log.every_steps=3")
    loader, _ = build_loaders(cfg, torch.device("cpu"))
    model = nn.BatchNorm2d(3, device="meta")
    guard = NonFiniteGuard(cfg, model, torch.optim.SGD(model.parameters()), loader)
    norm = torch.empty((), device="meta")
    guard.check(norm)
    guard.check(norm)
    with pytest.raises(NotImplementedError, match="meta"):
        guard.check(norm)  # the third step, after which it looks


def test_the_speed_is_that_of_the_steps_after_the_first(monkeypatch, tmp_path) -> None:
    """Also where a checkpoint counts a part of the first step's time."""
    now = 0.0
    monkeypatch.setattr(logger_module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(logger_module, "_log_to", lambda path, rank: None)
    cfg = make_config("loader=synthetic", "max_steps=5", f"output_dir={tmp_path}")
    cpu = torch.device("cpu")
    train_loader, _ = build_loaders(cfg, cpu, rank=1, world_size=2)
    logger = logger_module.RunLogger(cfg, cpu, rank=1, world_size=2)
    for _ in logger.track(train_loader, epoch=0):
        if logger.step_number == 0:
            now += 100
            logger.lap("compute")
            assert logger.images_per_s == logger.data_wait_share == 0
        now += 2
        logger.step_number += 1
    assert logger.seconds["first_step"] == 102
    assert logger.seconds["compute"] == 8
    assert logger.images_per_s == 4 * cfg.global_batch_size / 8


def test_float16_on_a_cpu_is_advised_against(caplog) -> None:
    caplog.set_level("INFO")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert amp_dtype("bfloat16", cpu) == torch.bfloat16
    assert amp_dtype("float16", gpu) == torch.float16
    assert not caplog.messages
    assert amp_dtype("float16", cpu) == torch.float16
    assert "try amp.dtype=bfloat16" in caplog.text
    with pytest.raises(ValueError, match="amp.dtype=float8 is unknown; use float16 or bfloat16"):
        amp_dtype("float8", gpu)


def page_faults(device: str) -> int:
    """Of allocating as a training step does, when the first steps are over."""
    # Where malloc starts from; what it makes of it depends on what was allocated so far.
    m_trim_threshold, m_mmap_threshold = -1, -3
    for option in (m_trim_threshold, m_mmap_threshold):
        assert ctypes.CDLL(None).mallopt(option, 128 << 10)
    if device:
        resolve_device(device)
    faults = []
    for _ in range(8):
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        activations = [torch.ones(size * MIB, dtype=torch.uint8) for size in (24, 5, 24, 1, 24)]
        del activations
    return faults[-1] - faults[3]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_is_kept_for_the_next_step_on_a_cpu() -> None:
    # Of a server that computes nothing, so that what this process did to malloc is not inherited.
    with multiprocessing.get_context("forkserver").Pool(1, maxtasksperchild=1) as pool:
        default, kept = pool.map(page_faults, ["", "cpu"], chunksize=1)
    assert kept < 100 < 10_000 < default


LEAVE = """
from pathlib import Path
import runtime.distributed, torch, torch.distributed as dist
names = lambda: [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
print("before", *[name for name in names() if "gloo" in name])
del model
runtime.distributed.leave_process_group()
print("after", *[name for name in names() if "gloo" in name])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the threads' names")
def test_no_thread_of_gloo_is_left_when_python_ends() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LEAVE], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    before, after = result.stdout.split("after")
    assert "gloo" in before
    assert "gloo" not in after
