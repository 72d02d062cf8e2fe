"""Work that can be watched, in a module that processes import quickly."""

import time


def moments(seconds: float) -> list[float]:
    """When this was computing, by `time.perf_counter`, until it had used so much CPU time."""
    end = time.process_time() + seconds
    found = []
    while time.process_time() < end:
        found.append(time.perf_counter())
    return found
