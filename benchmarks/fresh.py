"""A program in processes of its own: what they hold in memory, and their end after a time limit."""

import multiprocessing
import os
import re
import socket
import time
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


def run_limited(
    program: Callable[[], Any],
    num_ranks: int,
    log: Path,
    limit_s: float,
    context: Any = None,
) -> list[int | None]:
    """Exit codes of a program in processes of its own; None: it was ended by the time limit.

    Args:
        program: can be pickled. What it has started is ended with it.
        num_ranks: of processes with the variables of torchrun's ranks; 0: one process without.
        log: file that their output is appended to.
        limit_s: seconds for all of it.
        context: of `multiprocessing`, that starts the processes; default: they begin as new Pythons.
    """
    end = time.monotonic() + limit_s
    envs: list[dict[str, str]] = [{}]
    if num_ranks:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
        group |= {"LOCAL_WORLD_SIZE": str(num_ranks)}
        envs = [group | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(num_ranks)]
    context = context or multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run_logged, args=(program, log, each)) for each in envs]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            _end(process)


def _run_logged(program: Callable[[], Any], log: Path, env: dict[str, str]) -> None:
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    program()


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
