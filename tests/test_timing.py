"""Where the time of steps goes: what is measured, and what it says."""

import re
from itertools import chain, repeat
from unittest.mock import Mock

import pytest
import torch

from runtime.gpu_monitor import GpuMonitor
from runtime.timing import Timing, verdict
from tests.helpers import make_config, wait_for
from tests.parts import rows_of

GPU = "perf/gpu_utilization"


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


def test_a_gpu_is_watched_while_steps_are_made() -> None:
    read = chain([20], repeat(60)).__next__
    monitor = GpuMonitor(torch.device("cuda", 3), lambda device: float(read()))
    assert monitor.values().keys() == {"perf/peak_memory_gib"}
    for _ in range(2):
        monitor.start()
    wait_for(lambda: monitor.num_samples == 2, "two samples")
    monitor.stop()
    assert monitor.values()["perf/gpu_utilization"] == 0.4


def test_without_a_gpu_that_can_be_read_nothing_is_watched() -> None:
    read = Mock(side_effect=ModuleNotFoundError)
    for name, keys in {"cpu": set(), "cuda:0": {"perf/peak_memory_gib"}}.items():
        monitor = GpuMonitor(torch.device(name), read)
        monitor.start()
        assert monitor.values().keys() == keys
    wait_for(lambda: read.called, "a sample")
    assert monitor.num_samples == 0


@pytest.mark.parametrize(
    ("waits", "busy", "device", "settings", "expected", "advice"),
    [
        (0.19, None, "cpu", [], "compute", set()),
        (0.19, 0.8, "cuda", [], "compute", set()),
        (0.0, 0.0, "cuda", ["loader=synthetic", "model.compile=true"], "host", {"batch"}),
        (0.5, None, "cuda", ["data=mnist_mini"], "input", {"num_workers=auto"}),  # in memory
        *rows_of("ADVICE"),
    ],
)
def test_a_verdict_names_what_may_help_and_is_not_yet_used(
    waits, busy, device, settings, expected, advice
) -> None:
    speeds = {"perf/data_wait_share": waits} | ({} if busy is None else {GPU: busy})
    cfg = make_config("data=imagefolder", "data.root=photos", *settings)
    kind, _, tried = verdict(speeds, cfg, torch.device(device)).partition("-bound")
    found = re.findall(r"num_workers=auto|loader=\w+|compile|batch", tried)
    assert (kind, set(found)) == (expected, advice)
