"""What a run measures of itself: its operations, and the ranks that the others wait for."""

import socket
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from loaders import build_loaders
from models import build_model
from runtime.distributed import SlowRanks
from runtime.speed import Speed, flops_per_sample, peak_of
from runtime.timing import Timing
from tests.helpers import folder_with, make_config, replace, run_to_end, scalars_of, summary_of

CPU = torch.device("cpu")


def flops_of(*overrides: str, size: int = 16, add: tuple[nn.Module, ...] = ()) -> float | None:
    """Operations of a sample; counting them draws no number."""
    cfg = make_config("loader=synthetic", *overrides)
    loader, model = build_loaders(cfg, CPU)[0], build_model(cfg.model, 1, 10)
    state, inputs = torch.get_rng_state(), torch.zeros(4, 1, size, size)
    counted = flops_per_sample(cfg, loader, nn.Sequential(model, *add), inputs)
    assert torch.equal(torch.get_rng_state(), state)
    return counted


def test_the_operations_of_a_step_are_those_of_its_layers(caplog) -> None:
    first, last = 73_728, 1_280  # of the small CNN's layers in the forward of an image of 16x16
    forward = first + 2 * 589_824 + 294_912 + last
    both = 3 * forward - first  # with both gradients, but for the inputs' own
    assert flops_of("model.kwargs.batch_norm=false", "model.compile=true") == both
    assert flops_of("model.freeze=backbone") == forward + last
    mobile = ["model=torchvision", "model.arch=mobilenet_v3_small"]  # of convolutions in groups
    assert flops_of(*mobile, size=224) == pytest.approx(3 * 2 * 51e6, rel=0.02)
    assert flops_of(add=(nn.Linear(10, 10),)) is None  # a script has changed it
    with caplog.at_level("INFO"):
        assert flops_of("model=torchvision", "model.arch=regnet_y_400mf") is None
    assert "perf/tflops_per_s" in caplog.text


def test_a_gpu_is_known_by_the_words_of_its_name() -> None:
    peaks = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A10": 125,
        "Tesla T4": 65,
        "NVIDIA L40S": 362,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA RTX A4000": None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    }
    assert {name: peak_of(name) for name in peaks} == peaks


def test_a_rank_is_slow_that_is_a_tenth_slower_in_two_windows_in_a_row() -> None:
    """In windows of 10 s, one of four ranks spends some seconds more with one of the causes."""
    timing, own = Timing(CPU), np.zeros((4, 3))
    timing.seconds = {"first_step": 1.0, "compute": 0.0}
    ranks, slow = SlowRanks(nn.Linear(1, 1), timing), (3, "b", "host", 0.25)
    windows = [(2, 0, 2.0, None), (3, 1, 2.0, None), (3, 1, 2.0, slow), (3, 2, 2.0, None)]
    windows += [(3, 1, 0.9, None), (3, 1, 0.9, None)]
    for rank, cause, more_s, expected in windows:
        own = own + 1
        own[rank, cause] += more_s
        timing.seconds["compute"] += 10
        assert ranks.judge(["a", "a", "b", "b"], own) == expected


def test_a_gpu_is_timed_by_events_that_are_read_at_log_points_only() -> None:
    """Its host is late where it takes as long to launch the kernels as they run."""
    now, on_device = 0.0, 0.0
    reads = Mock(side_effect=lambda seconds: 1000 * seconds)

    def event(device: torch.device) -> Mock:
        at = on_device
        return Mock(at=at, elapsed_time=lambda end: reads(end.at - at))

    timing = Timing(CPU, lambda: now, event)
    timing.seconds["first_step"] = 1.0
    model = nn.Linear(1, 1)
    ranks = SlowRanks(model, timing)
    for launch_s, device_s in ((1.0, 5.0), (2.0, 2.0)):
        ranks.begin_step()
        now += launch_s
        on_device += device_s
        model(torch.ones(1)).backward()
    reads.assert_not_called()
    assert ranks.own_seconds() == (0.0, 3.0, 4.0)


def test_ranks_are_compared_at_log_points_only() -> None:
    cfg = make_config("loader=synthetic")
    gather = Mock(side_effect=lambda value: [value, value])
    group = Mock(rank=0, world_size=2, gather=gather)
    loader, timing = build_loaders(cfg, CPU)[0], Timing(CPU)
    speed, model = Speed(cfg, loader, group, timing), build_model(cfg.model, 1, 10)
    speed.open_run(model)
    batches = iter(loader)
    for _ in range(3):
        with timing.data_wait():
            inputs, targets = next(batches)
        speed.begin_step((inputs, targets))
        model(inputs).sum().backward()
        timing.end_step()
    gather.assert_not_called()
    timing.finished()
    speed.exchange()
    gather.assert_called_once()
    expected = {"images_per_s", "data_wait_share", "tflops_per_s"}  # and no rank that is slow
    assert speed.values().keys() == {f"perf/{name}" for name in expected}


CLOCK = """
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    model.register_forward_pre_hook(lambda *_: spend(0.1))
"""
SLOW = {
    "data": """
    batches = train_loader.finished_batches
    if group.rank == 1:
        train_loader.finished_batches = lambda: (spend(0.6) or x for x in batches())
""",
    "host": """
    if group.rank == 1:
        model.register_forward_pre_hook(lambda *_: spend(0.6))
""",
}
WAIT = """
            if group.rank == 0:
                spend(0.6)
"""


@pytest.mark.parametrize("cause", SLOW)
def test_a_rank_that_sleeps_is_named_with_its_host_and_the_cause(cause: str, tmp_path) -> None:
    """By a clock that only the script sets, since all ranks sleep on busy CPUs: rank 0 waits for
    the slow one after backward."""
    folder, run = folder_with(tmp_path / "s", "train_ddp.py"), tmp_path / "run"
    edits = {
        "    # state: what a checkpoint holds\n": f"{CLOCK}{SLOW[cause]}",
        "            # clip\n": WAIT,
        "        group=group,\n": "        clock=lambda: now[0],\n",
    }
    for place, added in edits.items():
        replace(folder / "train_ddp.py", place, f"{added}{place}")
    options = ["loader=synthetic", "global_batch_size=400", "data.crop=[12,12]", "log.images=0"]
    options += ["log.every_steps=5", "max_steps=11"]
    codes, texts = run_to_end("train_ddp.py", run, *options, folder=folder)
    assert codes == [0, 0], texts
    summary = summary_of(run)
    assert summary["perf/slowest_rank"] == 1
    slow = summary["slowest_rank"]
    assert (slow["rank"], slow["host"], slow["cause"]) == (1, socket.gethostname(), cause)
    assert slow["slower_by"] > 0.1
    [(step, rank), *_] = scalars_of(run, "perf/slowest_rank")
    assert (step, rank) == (10, 1)
    warned = [line for line in texts[0].splitlines() if f"rank 1 on {slow['host']}" in line]
    assert len(warned) == 2  # once, and at the end
    assert all(line.endswith(cause) for line in warned)
