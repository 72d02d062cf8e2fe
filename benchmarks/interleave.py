"""Fair measurement of workloads that alternate in short time slices, each in its own processes."""

import multiprocessing
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

SLICE_S = 0.2
EXIT_TIMEOUT_S, POLL_S = 5.0, 0.05
# Modules that the fork server imports once for all, if installed; none starts threads or CUDA.
PRELOAD = [
    *("benchmarks.loading", "benchmarks.bottleneck", "train", "torch._dynamo"),
    *("lightning.pytorch.loggers", "accelerate"),
]

CountItems = Callable[[int], None]
"""Called by a workload with the item count of each piece of work; raises SystemExit at the end."""

Workload = Callable[[CountItems], Any]
"""Function that works until `CountItems` raises SystemExit."""

Name = TypeVar("Name")


class SetupFailed(Exception):
    """A workload raised one of the expected errors before its first item."""


def measure(
    workloads: Mapping[Name, Workload],
    warmup_s: float,
    window_s: float,
    repeats: int,
    setup_errors: tuple[type[Exception], ...] = (),
    slice_s: float = SLICE_S,
    after_round: Callable[[], Any] = lambda: None,
) -> dict[Name, list[float] | str]:
    """Measure the speed of workloads that run alternately, one at a time.

    Between its time slices, a workload is stopped with all its threads and worker processes, so
    background and prefetched work counts. Noise that outlasts a few slices affects all workloads
    alike, and the i-th results of all come from the same round. I/O and queued GPU work continue
    while a workload is stopped: use long slices where these matter.

    Args:
        workloads: picklable workloads by name.
        warmup_s: seconds that each workload runs uncounted after its first piece of work.
        window_s: seconds per workload and round.
        repeats: number of rounds.
        setup_errors: exceptions before the first item that mean that a workload is not available.
        slice_s: length of a time slice in seconds; it ends with the piece of work in progress.
        after_round: called after each round.

    Returns:
        For each name the items per second of each round, or the message of its setup error.

    Raises:
        RuntimeError: a workload failed or its process died.
    """
    found: dict[Name, list[float] | str] = {}
    num_slices = max(1, round(window_s / slice_s))
    processes: dict[Name, _Process] = {}
    try:
        # Started and ended all at the same time, which uses all cores.
        for name, program in workloads.items():
            processes[name] = _Process(str(name), program, setup_errors)
        for name, process in processes.items():
            try:
                process.stop()
            except SetupFailed as error:
                found[name] = str(error)
        names = [name for name in processes if name not in found]
        speeds: dict[Name, list[float]] = {name: [] for name in names}
        for name in names:
            processes[name].run_for(warmup_s)
        order = random.Random(0)
        for _ in range(repeats):
            items, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
            for _ in range(num_slices):
                # After-effects, such as dirty pages, must not always affect the same successor.
                order.shuffle(names)
                for name in names:
                    start = time.perf_counter()
                    items[name] += processes[name].run_for(window_s / num_slices)
                    seconds[name] += time.perf_counter() - start
            for name in names:
                speeds[name].append(items[name] / seconds[name])
            after_round()
    finally:
        for process in processes.values():
            process.connection.close()  # ends the group, see _end_orphaned_group
        for process in processes.values():
            process.process.join()
    return {**found, **speeds}


class _Process:
    """A workload in its own process group, stopped after its first piece of work and each slice."""

    def __init__(
        self, name: str, program: Workload, setup_errors: tuple[type[Exception], ...]
    ) -> None:
        # A fork has no threads, which OpenMP would miss: the fork server has not computed anything.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.name = name
        self.connection, others = context.Pipe()
        self.process = context.Process(
            target=_run_workload, args=(name, program, setup_errors, others)
        )
        self.process.start()
        others.close()
        assert self.process.pid is not None, "it was started"
        self.group = self.process.pid

    def run_for(self, seconds: float) -> int:
        """Run for this many seconds; return the number of items."""
        with suppress(ProcessLookupError, ConnectionError):  # it died; stop() raises an error
            os.killpg(self.group, signal.SIGCONT)
            self.connection.send(seconds)
        return self.stop()

    def stop(self) -> int:
        """Stop the process after its current piece of work; return the number of items.

        Raises:
            SetupFailed: the workload raised a setup error.
            RuntimeError: it failed or its process died.
        """
        wait([self.connection, self.process.sentinel])
        try:
            # The watchdog of a dead process holds the other end open: recv() would block.
            items = self.connection.recv() if self.connection.poll() else None
        except (EOFError, ConnectionError):
            items = None
        if items is None:
            self.process.join()
            raise RuntimeError(
                f"{self.name}: its process ended with exit code {self.process.exitcode} "
                "(-9: killed, perhaps out of memory); see its output above"
            )
        if isinstance(items, Exception):
            raise items
        with suppress(ProcessLookupError):  # it died; the next run_for() raises an error
            os.killpg(self.group, signal.SIGSTOP)
        return items


def _run_workload(
    name: str, program: Workload, setup_errors: tuple[type[Exception], ...], connection: Connection
) -> None:
    """Main function of a workload's process; it runs for the seconds that `connection` receives."""
    os.setpgrp()
    group = os.getpgrp()
    watchdog = os.fork()
    if watchdog == 0:
        _end_orphaned_group(group, connection)
        os._exit(0)
    os.setpgid(watchdog, watchdog)  # before this group can be stopped
    # Worker processes of the workload start by the platform's default method.
    multiprocessing.set_start_method(None, force=True)
    items, end = 0, 0.0

    def count(number: int) -> None:
        nonlocal items, end
        items += number
        if time.perf_counter() < end:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        try:
            connection.send(items)
            seconds = connection.recv()
        except (EOFError, ConnectionError):
            raise SystemExit from None
        items, end = 0, time.perf_counter() + seconds

    try:
        program(count)
    except Exception as error:
        is_refusal = isinstance(error, setup_errors) and end == 0
        text = f"{name} failed:\n{traceback.format_exc()}"
        connection.send(SetupFailed(str(error)) if is_refusal else RuntimeError(text))


def _end_orphaned_group(group: int, connection: Connection) -> None:
    """End a process group when the other end of `connection` is closed; runs outside the group."""
    hangup = select.poll()
    hangup.register(connection, 0)
    hangup.poll()
    with suppress(ProcessLookupError):  # the group has ended
        os.killpg(group, signal.SIGCONT)
        for _ in range(round(EXIT_TIMEOUT_S / POLL_S)):
            os.killpg(group, 0)
            time.sleep(POLL_S)
        os.killpg(group, signal.SIGKILL)
