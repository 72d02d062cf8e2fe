"""Speeds, measured side by side, with confidence intervals that assume nothing of the noise."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import psutil

CONFIDENCE = 0.95
IDLE_SHARE = 0.1  # of one core
LONGEST_IDLE_WAIT_S = 3.0
# Every window follows at least so many draws that do not count, so that what a loader had prepared
# while it was not being timed is used up.
LEAD_IN_DRAWS = 5

Draw = Callable[[], int]
"""Does one piece of work, such as fetching a batch, and returns the number of items in it."""


class Summary(NamedTuple):
    median: float
    low: float
    high: float


def rounds(names: list[str], repeats: int) -> Iterator[str]:
    """Round robin: every round names each subject once, the first one changing from round to round.

    Noise that comes and goes hits all subjects alike, and sample i of each belongs to round i.
    """
    for number in range(repeats):
        start = number % len(names) if names else 0
        yield from names[start:] + names[:start]


def measure(
    subjects: dict[str, Draw],
    warmup_s: float,
    window_s: float,
    repeats: int,
    lead_in_draws: Mapping[str, int] = MappingProxyType({}),
    synchronise: Callable[[], None] = lambda: None,
    after_window: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Items per second of each subject, one sample per round.

    Args:
        subjects: by name; process-based ones first, so that they fork before others start threads.
        warmup_s: seconds that each subject works before anything is counted.
        window_s: seconds of one sample at least; a piece of work is never cut.
        repeats: number of rounds.
        lead_in_draws: by name, for subjects that prepare more than LEAD_IN_DRAWS pieces in advance.
        synchronise: waits for work that was queued on a device.
        after_window: called with the name of the subject whose window ended.
    """
    for draw in subjects.values():
        _work(draw, warmup_s, least=1)
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for name in rounds(list(subjects), repeats):
        draw = subjects[name]
        wait_until_idle()
        _work(draw, window_s / 4, least=max(LEAD_IN_DRAWS, lead_in_draws.get(name, 0)))
        synchronise()
        start = time.perf_counter()
        items = _work(draw, window_s, least=1)
        synchronise()
        samples[name].append(items / (time.perf_counter() - start))
        after_window(name)
    return samples


def _work(draw: Draw, seconds: float, least: int) -> int:
    """Draw for so many seconds and at least so many times; returns the number of items."""
    end = time.perf_counter() + seconds
    items = draws = 0
    while draws < least or time.perf_counter() < end:
        items += draw()
        draws += 1
    return items


def wait_until_idle() -> None:
    """Wait for this process and its children to finish what they were preparing in advance."""
    end = time.perf_counter() + LONGEST_IDLE_WAIT_S
    step_s = 0.05
    before = _cpu_seconds()
    while time.perf_counter() < end:
        time.sleep(step_s)
        after = _cpu_seconds()
        if after - before <= IDLE_SHARE * step_s:
            return
        before = after


def _cpu_seconds() -> float:
    """CPU time of this process and its living children."""
    this = psutil.Process()
    total = 0.0
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def summarise(samples: list[float]) -> Summary:
    """Median and its confidence interval from order statistics.

    The interval from the k-th smallest to the k-th largest sample holds the true median with
    probability 1 - 2 P(X < k), X binomial with n and 1/2, whatever the distribution (David and
    Nagaraja 2003, "Order statistics", section 7.1). It is the narrowest such interval with at least
    95 %. That takes 6 samples; with fewer it is the range of all of them, which holds the median
    with probability 1 - 2^(1 - n).
    """
    if not samples:
        return Summary(math.nan, math.nan, math.nan)
    ordered = sorted(samples)
    count = len(ordered)
    k = 1
    while k < (count + 1) // 2:
        outside = 2 * sum(math.comb(count, i) for i in range(k + 1)) / 2**count
        if 1 - outside < CONFIDENCE:
            break
        k += 1
    return Summary(statistics.median(ordered), ordered[k - 1], ordered[count - k])


def ratios(samples: list[float], reference: list[float]) -> Summary:
    """How many times as large: the ratio is taken in each round, then summarised.

    Raises:
        ValueError: the two have unequal numbers of rounds, so they were not measured side by side.
    """
    if len(samples) != len(reference):
        raise ValueError(
            f"{len(samples)} and {len(reference)} samples were not taken side by side; measure both "
            "in one call of measure()"
        )
    return summarise([a / b for a, b in zip(samples, reference, strict=True)])
