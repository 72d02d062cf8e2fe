"""Rounds of measurements, and medians with confidence intervals that assume nothing of the noise."""

import math
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil

CONFIDENCE = 0.95
IDLE_SHARE = 0.1  # of one core
LONGEST_IDLE_WAIT_S = 3.0
# A window follows so many steps that do not count, so that what a loader had prepared while it was not
# being timed is used up.
LEAD_IN_STEPS = 5


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
            "in one run"
        )
    return summarise([a / b for a, b in zip(samples, reference, strict=True)])
