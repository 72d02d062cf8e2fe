"""Whole programs measured side by side: each in a process of its own, of which only one runs at a time."""

import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, NamedTuple

import psutil


class Outcome(NamedTuple):
    """What became of a call."""

    result: Any
    turns: list[tuple[float, float]]
    """When its process ran: starts and ends in seconds, by the clock of `time.perf_counter`."""

    def running_s(self, start: float, end: float) -> float:
        """Seconds between two moments in which its process ran."""
        return sum(max(0.0, min(end, last) - max(start, first)) for first, last in self.turns)


def take_turns(
    calls: Mapping[str, Callable[[], Any]], turn_s: float | None, preload: Sequence[str] = ()
) -> dict[str, Outcome]:
    """Let each call run for a moment in turn, until all have returned.

    Between its turns a process is stopped with all its threads, so a call also pays for what it does
    in the background. Noise that lasts longer than a few turns hits all calls alike. What a call
    waits for, such as a disk, goes on while others have their turn.

    Args:
        calls: by name; they can be pickled, and what they return or raise too.
        turn_s: length of a turn; None: each runs to its end.
        preload: modules to be imported once for all processes; those not installed are left out.

    Raises:
        RuntimeError: a process died. What a call raises is raised here too.
    """
    # Forked from a process in which nothing was computed: OpenMP's threads would be missing in a fork.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    waiting: dict[str, tuple[Any, Connection, list[tuple[float, float]]]] = {}
    outcomes = {}
    try:
        for name, call in calls.items():
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(call, sender))
            process.start()
            sender.close()
            waiting[name] = process, receiver, []
            psutil.Process(process.pid).suspend()
        while waiting:
            for name, (process, receiver, turns) in list(waiting.items()):
                start = perf_counter()
                psutil.Process(process.pid).resume()
                has_ended = receiver.poll(turn_s)
                if not has_ended:
                    psutil.Process(process.pid).suspend()
                turns.append((start, perf_counter()))
                if has_ended:
                    outcomes[name] = Outcome(_received(receiver, name), turns)
                    process.join()
                    del waiting[name]
    finally:
        for process, *_ in waiting.values():
            process.kill()
    return outcomes


def _answer(call: Callable[[], Any], sender: Connection) -> None:
    try:
        answer = call()
    except Exception as error:
        error.add_note(traceback.format_exc())
        answer = error
    sender.send(answer)


def _received(receiver: Connection, name: str) -> Any:
    try:
        answer = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{name}: the process died; what it printed says why") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
