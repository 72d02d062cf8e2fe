"""Speeds of programs that take turns, each measured in a process of its own."""

import multiprocessing
import random
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

LIMIT_S = 600
"""After which a program that has not answered has failed."""

CountItems = Callable[[int], None]
"""Called by a workload with the number of items of each piece of work; raises SystemExit at the
end."""

Workload = Callable[[CountItems], Any]
"""Function that works until `CountItems` raises SystemExit."""

Name = TypeVar("Name")


class NotAvailable(Exception):
    """A workload raised an error before its first item."""


def measure(
    workloads: Mapping[Name, Workload],
    warmup_s: float,
    window_s: float,
    repeats: int,
) -> dict[Name, list[float] | str]:
    """Measure the speed of workloads, one at a time and in another order in each round.

    Each process is new, and so are its caches, workers and queues; the i-th results of all come
    from the same round, so that noise that outlasts a round affects all alike.

    Args:
        workloads: picklable workloads by name.
        warmup_s: seconds that a workload runs uncounted after its first piece of work.
        window_s: seconds that are counted.
        repeats: number of rounds.

    Returns:
        For each name the items per second of each round, or the message of the error that it raised
        before its first item.

    Raises:
        RuntimeError: a workload failed later, or its process died.
    """
    speeds: dict[Name, list[float]] = {name: [] for name in workloads}
    reasons: dict[Name, str] = {}
    order = random.Random(0)
    for _ in range(repeats):
        names = [name for name in workloads if name not in reasons]
        order.shuffle(names)
        for name in names:
            try:
                speeds[name].append(run_once(str(name), workloads[name], warmup_s, window_s))
            except NotAvailable as error:
                reasons[name] = str(error)
    return {name: reasons.get(name, speeds[name]) for name in workloads}


def run_once(name: str, workload: Workload, warmup_s: float, window_s: float) -> float:
    """Return the items per second of a workload in a new process; errors as of `measure()`."""
    # A fork has no threads, which OpenMP would miss: the fork server has not computed anything.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.compare", "train", "torch._dynamo"])
    ours, theirs = context.Pipe()
    process = context.Process(target=run_workload, args=(workload, warmup_s, window_s, theirs))
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(LIMIT_S) else "no answer in time"
    except EOFError:
        process.join()
        answer = f"its process ended with exit code {process.exitcode} (-9: perhaps of memory)"
    finally:
        process.terminate()  # if it still works; its workers watch it
        process.join()
    if isinstance(answer, NotAvailable):
        raise answer
    if isinstance(answer, str):
        raise RuntimeError(f"{name}: {answer}")
    return answer


def run_workload(
    workload: Workload, warmup_s: float, window_s: float, connection: Connection
) -> None:
    """Run a workload, and send its speed or an error."""
    # Worker processes of the workload start by the platform's default method.
    multiprocessing.set_start_method(None, force=True)
    num_calls, items, begin, start = 0, 0, 0.0, 0.0

    def count(number: int) -> None:
        nonlocal num_calls, items, begin, start
        num_calls += 1
        now = time.perf_counter()
        if num_calls == 1:
            begin = now
        if start:
            items += number
        elif now >= begin + warmup_s:
            start = synchronized_time()
        if items and now >= start + window_s:
            connection.send(items / (synchronized_time() - start))
            raise SystemExit

    try:
        workload(count)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        failure = f"{text}\n{traceback.format_exc()}"
        connection.send(NotAvailable(text) if num_calls == 0 else failure)


def synchronized_time() -> float:
    """Return the time in seconds, when the GPU has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
