"""Where the time of steps goes: what is measured, and what it says."""

import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from runtime.process_group import ProcessGroup
from runtime.timing import Timer, bottleneck


class TimerOfGPU(Timer):
    """A timer whose device goes on by itself, behind the host: `on_device` is its time."""

    now = on_device = 0
    behind = 0  # what the host waits until the device has finished

    def __init__(self, group: Any) -> None:
        super().__init__(torch.device("cpu"), group, 8, lambda: float(self.now))

    def _now(self) -> Mock:
        at = self.on_device
        return Mock(at=at, **{"elapsed_time.side_effect": lambda end: 1000 * (end.at - at)})

    def _wait(self) -> None:
        self.now, self.behind = self.now + self.behind, 0


def test_a_gpu_waits_for_data_while_it_has_nothing_to_do() -> None:
    """The host is ahead: it waits for batches and launches work while the device works or waits."""
    timer = TimerOfGPU(ProcessGroup())
    for _ in range(4):
        timer.mark("rest")
        timer.now += 5
        timer.on_device += 1
        timer.mark("data_wait")
        timer.now += 1
        timer.end_step()
    timer.behind = 6
    timer.finish_steps()
    expected = {"first_step": 6.0, "data_wait": 3.0, "compute": 21.0}
    assert expected.items() <= timer.seconds.items()
    values = timer.values()
    assert (values["perf/images_per_s"], values["perf/data_wait_share"]) == (1.0, 0.125)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((10.0, 10.0, 10.9, 10.0), {}),
        ((10.0, 10.0, 12.5, 12.0), {"rank": 2, "host": "a", "slower_by": 0.25}),
        ((1.0, 1.5), {}),  # of less than two seconds: noise
    ],
)
def test_the_slowest_rank_is_a_tenth_slower_than_the_median(seconds, expected) -> None:
    ranks = [(each, 0.0, "a") for each in seconds]
    timer = TimerOfGPU(Mock(world_size=len(ranks), **{"gather.return_value": ranks}))
    timer.log_point()
    assert timer.slow == expected
    assert timer.values().get("perf/slowest_rank") == expected.get("rank")


def test_a_ranks_own_part_of_a_step_ends_with_its_last_gradient() -> None:
    """After it, the rank waits for the others."""
    timer, layers = TimerOfGPU(Mock(world_size=2)), [torch.nn.Linear(1, 1) for _ in range(2)]

    def work(gradient: torch.Tensor) -> None:
        timer.on_device += 2

    timer.watch(torch.nn.Sequential(*layers))
    timer.mark("rest")
    timer.on_device += 1
    timer.mark("data_wait")
    between = layers[0](torch.ones(1, 1))
    between.register_hook(work)
    layers[1](between).backward()
    timer.on_device += 4
    timer.mark("rest")
    timer.finish_steps()
    assert timer.own_s == 3


@pytest.mark.parametrize(
    ("waits", "busy", "expected", "advice"),
    [
        (0.19, {}, "compute", set()),
        (0.19, {"perf/gpu_utilization": 0.8}, "compute", set()),
        (0.0, {"perf/gpu_utilization": 0.5}, "host", {"model.compile=true", "global_batch_size"}),
        (0.5, {}, "input", {"tools.bottleneck", "loader.num_workers"}),
    ],
)
def test_a_verdict_names_what_may_help(waits, busy, expected, advice) -> None:
    bound, fix = bottleneck({"perf/data_wait_share": waits} | busy)
    assert bound.startswith(f"{expected}-bound: {waits:.0%} of the time waiting for data")
    assert set(re.findall(r"\w+\.\w+(?:=\w+)?|global_batch_size", fix)) == advice
