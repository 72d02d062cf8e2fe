"""Which rank the others wait for, by the time that each needs for its own part of the steps."""

import socket
from unittest.mock import Mock

import torch
from torch import nn

from runtime.speed import Speed, slowest
from runtime.timing import Timing
from tests.helpers import folder_with, replace, run_to_end, scalars_of, summary_of

CPU = torch.device("cpu")


def test_the_slowest_rank_is_a_tenth_slower_than_the_median() -> None:
    hosts = ("a", "a", "b", "b")
    assert slowest(hosts, (10.0, 10.0, 10.9, 10.0)) is None
    assert slowest(hosts, (10.0, 10.0, 12.5, 12.0)) == (2, "b", 0.25)
    assert slowest(hosts[:2], (10.0, 15.0)) == (1, "a", 0.5)
    assert slowest(hosts[:2], (1.0, 1.5)) is None  # of less than two seconds: noise


def test_a_gpu_is_timed_by_events_that_are_read_at_log_points_only() -> None:
    """It computes for 7 s, of which this rank's host launches kernels for 3 s."""
    now, on_device = 0.0, 0.0
    reads = Mock(side_effect=lambda seconds: 1000 * seconds)

    def event(device: torch.device) -> Mock:
        at = on_device
        return Mock(at=at, elapsed_time=lambda end: reads(end.at - at))

    timing = Timing(CPU, lambda: now, event)
    timing.seconds["first_step"] = 1.0
    group = Mock(world_size=2, **{"gather.side_effect": lambda value: [("b", 4.0, 0.0), value]})
    speed, model = Speed(group, timing), nn.Linear(1, 1)
    speed.open_run(model)
    for launch_s, device_s in ((1.0, 5.0), (2.0, 2.0)):
        speed.begin_step((torch.ones(1, 1), torch.ones(1)))
        now += launch_s
        on_device += device_s
        model(torch.ones(1)).backward()
    reads.assert_not_called()
    group.gather.assert_not_called()
    speed.exchange()
    assert speed.slow == (1, socket.gethostname(), 0.75)
    assert speed.values()["perf/slowest_rank"] == 1


SLOW = """
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    model.register_forward_pre_hook(lambda *_: spend(0.5))
    if group.rank == 1:
        model.register_forward_pre_hook(lambda *_: spend(0.5))
"""
WAIT = """
            if group.rank == 0:
                spend(0.5)
"""


def test_a_slow_rank_is_named_with_its_host(tmp_path) -> None:
    """By a clock that only the script sets, since all ranks sleep on busy CPUs: rank 0 waits for
    the slow one after backward."""
    folder, run = folder_with(tmp_path / "s", "train_ddp.py"), tmp_path / "run"
    edits = {
        "    # state: what a checkpoint holds\n": SLOW,
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
    expected = {"rank": 1, "host": socket.gethostname(), "slower_by": 1.0}
    assert (summary["slowest_rank"], summary["perf/slowest_rank"]) == (expected, 1)
    assert scalars_of(run, "perf/slowest_rank") == [(5, 1), (10, 1), (11, 1)]
    assert f"rank 1 on {expected['host']}" in texts[0].splitlines()[-3]
