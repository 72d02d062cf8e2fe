"""Where the time of steps goes: what is measured, and what it says."""

import re
import socket
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from runtime.process_group import ProcessGroup
from runtime.timing import Timer, bottleneck

GPU = "perf/gpu_utilization"


class TimerOfGPU(Timer):
    """A timer whose device goes on by itself, behind the host: `on_device` is its time."""

    now = on_device = num_reads = 0

    def __init__(self, group: Any) -> None:
        super().__init__(torch.device("cpu"), group, lambda: float(self.now))

    def _now(self) -> Mock:
        at = self.on_device

        def elapsed_ms(end: Mock) -> float:
            self.num_reads += 1
            return 1000 * (end.at - at)

        return Mock(at=at, elapsed_time=elapsed_ms)


def test_a_gpu_waits_for_data_while_it_has_nothing_to_do() -> None:
    """The host is ahead: it waits for batches and launches work while the device works or waits."""
    timer = TimerOfGPU(ProcessGroup())
    for _ in range(4):
        with timer.data_wait():
            timer.now += 5
            timer.on_device += 1
        timer.now += 1
        timer.end_step(num_images=8)
    timer.now += 6  # until the device has finished, too
    timer.finish_steps()
    times = {name: timer.seconds[name] for name in ("first_step", "data_wait", "compute")}
    assert times == {"first_step": 6.0, "data_wait": 3.0, "compute": 21.0}
    values = timer.values()
    assert (values["perf/images_per_s"], values["perf/data_wait_share"]) == (1.0, 0.125)


def test_the_own_work_of_a_rank_is_read_at_log_points_only() -> None:
    """The device computes for 7 s, of which this rank's host launches kernels for 3 s."""
    group = Mock(world_size=2, **{"gather.side_effect": lambda value: [(4.0, 0.0, "b"), value]})
    timer, model = TimerOfGPU(group), nn.Linear(1, 1)
    timer.watch(model)
    for launch_s, device_s in ((1, 5), (2, 2)):
        with timer.data_wait():
            pass
        timer.now += launch_s
        timer.on_device += device_s
        model(torch.ones(1)).backward()
    assert timer.num_reads == 0
    timer.log_point()
    assert timer.slow == {"rank": 1, "host": socket.gethostname(), "slower_by": 0.75}
    assert timer.values()["perf/slowest_rank"] == 1


def test_the_slowest_rank_is_a_tenth_slower_than_the_median() -> None:
    for seconds, expected in [
        ((10.0, 10.0, 10.9, 10.0), {}),
        ((10.0, 10.0, 12.5, 12.0), {"rank": 2, "host": "a", "slower_by": 0.25}),
        ((1.0, 1.5), {}),  # of less than two seconds: noise
    ]:
        ranks = [(each, 0.0, "a") for each in seconds]
        timer = TimerOfGPU(Mock(world_size=len(ranks), **{"gather.return_value": ranks}))
        timer.log_point()
        assert timer.slow == expected


@pytest.mark.parametrize(
    ("waits", "busy", "expected", "advice"),
    [
        (0.19, None, "compute", set()),
        (0.19, 0.8, "compute", set()),
        (0.0, 0.5, "host", {"model.compile=true", "global_batch_size"}),
        (0.5, None, "input", {"tools.bottleneck", "loader.num_workers"}),
    ],
)
def test_a_verdict_names_what_may_help(waits, busy, expected, advice) -> None:
    values = {"perf/data_wait_share": waits} | ({} if busy is None else {GPU: busy})
    bound, fix = bottleneck(values)
    assert bound.startswith(f"{expected}-bound: {waits:.0%} of the time waiting for data")
    assert set(re.findall(r"\w+\.\w+(?:=\w+)?|global_batch_size", fix)) == advice
