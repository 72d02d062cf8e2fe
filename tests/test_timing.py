"""Where the time of steps goes: what is measured, and what it says."""

import re
from itertools import chain, repeat
from threading import active_count
from unittest.mock import Mock

import pytest
import torch

from runtime.gpu_monitor import GpuMonitor
from runtime.speed import verdict
from runtime.timing import Timing
from tests.helpers import make_config, wait_for
from tests.parts import rows_of

GPU = "perf/gpu_utilization"


def test_a_gpu_waits_for_data_while_it_has_nothing_to_do() -> None:
    """The host is ahead: it waits for batches and launches work while the device works or waits."""
    now, on_device = 0.0, 0.0

    def event(device: torch.device) -> Mock:
        at = on_device
        return Mock(at=at, elapsed_time=lambda end: 1000 * (end.at - at))

    times = Timing(torch.device("cpu"), lambda: now, event)
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
    read = Mock(side_effect=chain([20.0], repeat(60.0)))
    monitor = GpuMonitor(torch.device("cuda", 3), read)
    assert monitor.values().keys() == {"perf/peak_memory_gib"}
    num_threads = active_count()
    for _ in range(2):
        monitor.start()
    assert active_count() == num_threads + 1
    wait_for(lambda: monitor.num_samples == 2, "two samples")
    monitor.stop()
    assert monitor.values()[GPU] == 0.4
    monitor = GpuMonitor(torch.device("cpu"), read)
    monitor.start()
    assert not monitor.values()


def test_a_gpu_that_cannot_be_read_is_not_watched() -> None:
    read = Mock(side_effect=ModuleNotFoundError)
    monitor = GpuMonitor(torch.device("cuda", 0), read)
    monitor.start()
    wait_for(lambda: read.called, "a sample")
    assert monitor.values().keys() == {"perf/peak_memory_gib"}


@pytest.mark.parametrize(
    ("waits", "busy", "device", "settings", "expected", "advice"),
    [
        (0.19, None, "cpu", [], "compute", set()),
        (0.19, 0.8, "cuda", [], "compute", set()),
        (0.0, 0.0, "cuda", ["loader=synthetic", "model.compile=true"], "host", {"batch"}),
        (0.5, None, "cuda", ["data=mnist_mini"], "input", {"bottleneck"}),  # in memory
        *rows_of("ADVICE"),
    ],
)
def test_a_verdict_names_what_may_help_and_is_not_yet_used(
    waits, busy, device, settings, expected, advice
) -> None:
    speeds = {"perf/data_wait_share": waits} | ({} if busy is None else {GPU: busy})
    cfg = make_config("data=imagefolder", "data.root=photos", *settings)
    kind, _, tried = verdict(speeds, cfg, torch.device(device)).partition("-bound")
    found = re.findall(r"bottleneck|loader=\w+|compile|batch", tried)
    assert (kind, set(found)) == (expected, advice)
