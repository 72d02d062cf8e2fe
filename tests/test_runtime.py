"""Parts of `runtime/` by themselves."""

import ctypes
import functools
import platform
import resource

import pytest
import torch

from benchmarks.turns import take_turns
from runtime.setup import resolve_device

MIB = 1 << 20


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
    calls = {name: functools.partial(page_faults, name) for name in ("", "cpu")}
    default, kept = (outcome.result for outcome in take_turns(calls, None).values())
    assert kept < 100 < 10_000 < default
