"""Programs measured side by side: each in processes of its own, and only one of them works at a time."""

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

TURN_S = 0.2
END_S, POLL_S = 5.0, 0.05
# Imported once for all processes, as far as it is installed. Nothing of it may start threads or a GPU.
PRELOAD = [
    *("benchmarks.loading", "benchmarks.bottleneck", "train", "torch._dynamo"),
    *("lightning.pytorch.loggers", "accelerate"),
]

Count = Callable[[int], None]
"""What a program calls after each piece of work, with the number of items in it."""

Program = Callable[[Count], Any]
"""Works on and on; it ends when `Count` raises SystemExit."""


Name = TypeVar("Name")


class Refused(Exception):
    """A program says that it cannot begin."""


def measure(
    programs: Mapping[Name, Program],
    warmup_s: float,
    window_s: float,
    repeats: int,
    refusals: tuple[type[Exception], ...] = (),
    turn_s: float = TURN_S,
    after_round: Callable[[], Any] = lambda: None,
) -> dict[Name, list[float] | str]:
    """Let programs work in turns of a moment each.

    Between its turns a program is stopped with all its threads and worker processes, so it also pays
    for what it does in the background and in advance. Noise that lasts longer than a few turns hits
    all alike, and the i-th figure of each belongs to round i. What a program waits for, such as a
    disk, and what it has queued on a GPU goes on while others have their turn: where that may be much,
    turns should be long.

    Args:
        programs: by name; they can be pickled.
        warmup_s: seconds that each works before anything is counted, from its first piece of work on.
        window_s: seconds in each round, in turns of about `turn_s`.
        repeats: number of rounds.
        refusals: what a program may raise at first to say that it cannot be measured.
        turn_s: a turn ends with the first piece of work that is finished after so many seconds.
        after_round: called after each round.

    Returns:
        By name the items per second in each round, or why a program could not begin.

    Raises:
        RuntimeError: a program failed or its process died.
    """
    found: dict[Name, list[float] | str] = {}
    num_turns = max(1, round(window_s / turn_s))
    processes: dict[Name, _Process] = {}
    try:
        # All begin at the same time, which makes use of all CPUs, and end so.
        for name, program in programs.items():
            processes[name] = _Process(str(name), program, refusals)
        for name, process in processes.items():
            try:
                process.stop()
            except Refused as error:
                found[name] = str(error)
        names = [name for name in processes if name not in found]
        speeds: dict[Name, list[float]] = {name: [] for name in names}
        for name in names:
            processes[name].turn(warmup_s)
        order = random.Random(0)
        for _ in range(repeats):
            items, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
            for _ in range(num_turns):
                # What one leaves behind, such as dirty pages, shall not always hit the same other one.
                order.shuffle(names)
                for name in names:
                    start = time.perf_counter()
                    items[name] += processes[name].turn(window_s / num_turns)
                    seconds[name] += time.perf_counter() - start
            for name in names:
                speeds[name].append(items[name] / seconds[name])
            after_round()
    finally:
        for process in processes.values():
            process.connection.close()  # which _end_group sees
        for process in processes.values():
            process.process.join()
    return {**found, **speeds}


class _Process:
    """A program in a process group of its own: it works until its first piece of work is done, and then
    when it has its turn."""

    def __init__(self, name: str, program: Program, refusals: tuple[type[Exception], ...]) -> None:
        # Forked from a process in which nothing was computed: OpenMP's threads would be missing in a fork.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.name = name
        self.connection, others = context.Pipe()
        self.process = context.Process(target=_work, args=(name, program, refusals, others))
        self.process.start()
        others.close()
        assert self.process.pid is not None, "it was started"
        self.group = self.process.pid

    def turn(self, seconds: float) -> int:
        """Let it work for so many seconds; returns the number of items."""
        with suppress(ProcessLookupError, ConnectionError):  # it has died, which stop() tells
            os.killpg(self.group, signal.SIGCONT)
            self.connection.send(seconds)
        return self.stop()

    def stop(self) -> int:
        """Wait until it has done its work, and stop it; returns the number of items.

        Raises:
            Refused: it cannot begin.
            RuntimeError: it failed or died.
        """
        wait([self.connection, self.process.sentinel])
        try:
            # If it has died, its guardian still holds the other end.
            items = self.connection.recv() if self.connection.poll() else None
        except (EOFError, ConnectionError):
            items = None
        if items is None:
            self.process.join()
            raise RuntimeError(
                f"{self.name}: its process ended with exit code {self.process.exitcode} (a negative one "
                "is that of a signal: -9 if memory ran out); what it printed may say why"
            )
        if isinstance(items, Exception):
            raise items
        with suppress(ProcessLookupError):  # it has died, which the next turn tells
            os.killpg(self.group, signal.SIGSTOP)
        return items


def _work(
    name: str, program: Program, refusals: tuple[type[Exception], ...], connection: Connection
) -> None:
    """In a process of its own: works when the other end says so, and sends what came of it."""
    os.setpgrp()
    group = os.getpgrp()
    guardian = os.fork()
    if guardian == 0:
        _end_group(group, connection)
        os._exit(0)
    os.setpgid(guardian, guardian)  # before this group can be stopped
    multiprocessing.set_start_method(None, force=True)  # the platform's default for its workers
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
        is_refusal = isinstance(error, refusals) and end == 0
        text = f"{name} failed:\n{traceback.format_exc()}"
        connection.send(Refused(str(error)) if is_refusal else RuntimeError(text))


def _end_group(group: int, connection: Connection) -> None:
    """In a process that is never stopped: end a group as soon as nobody holds the connection's other end."""
    hangup = select.poll()
    hangup.register(connection, 0)
    hangup.poll()
    with suppress(ProcessLookupError):  # the group has ended
        os.killpg(group, signal.SIGCONT)
        for _ in range(round(END_S / POLL_S)):
            os.killpg(group, 0)
            time.sleep(POLL_S)
        os.killpg(group, signal.SIGKILL)
