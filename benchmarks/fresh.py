"""A program in a process that starts anew, and what it and the processes that it starts hold in memory."""

import multiprocessing
import os
import re
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from benchmarks import records

SAMPLING_S = 0.1
"""How often memory is looked at."""


def run_fresh(program: Callable[[], Any], cores: list[int]) -> tuple[Any, float]:
    """What a program returns, and the peak of `memory_mb` until then.

    Args:
        program: can be pickled. What it has started is ended when it returns.
        cores: numbers of the CPU cores that it may use.

    Raises:
        RuntimeError: it has raised an exception, whose text this is, or died.
    """
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(program, there))
    before, peak_mb = records.cores(), 0.0
    os.sched_setaffinity(0, cores)  # which it inherits
    try:
        process.start()
    finally:
        os.sched_setaffinity(0, before)
    there.close()
    try:
        while not here.poll(SAMPLING_S):
            peak_mb = max(peak_mb, memory_mb(process.pid))
        answer = here.recv()
    except EOFError:
        answer = RuntimeError(f"its process ended with exit code {process.exitcode}")
    finally:
        _end(process)
    if isinstance(answer, RuntimeError):
        raise answer
    return answer, peak_mb


def _run(program: Callable[[], Any], answer: Connection) -> None:
    multiprocessing.set_start_method(None, force=True)  # the platform's default for its workers
    try:
        answer.send(program())
        answer.poll(None)  # until it is ended
    except Exception as error:
        answer.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _end(process: BaseProcess) -> None:
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.join()


def memory_mb(pid: int | None) -> float:
    """What a process and those that it has started hold together, beside files; what they share counts once."""
    kb = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(OSError):
                text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
                kb += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", text, re.M)))
    return kb * 1024 / 1e6
