"""Functions run in new processes, with their peak memory or under a time limit."""

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
"""Interval in seconds at which the memory is sampled."""


def run_fresh(
    program: Callable[[], Any], cores: list[int], context: Any = None
) -> tuple[Any, float]:
    """Run a function in a new process; return its result and the peak of `memory_mb()` in MB.

    Args:
        program: picklable function. Child processes that it leaves are killed.
        cores: numbers of the CPU cores that it may use.
        context: `multiprocessing` context of the process; default: spawn, which `cores` needs.

    Raises:
        RuntimeError: the function raised an exception, whose text is shown, or its process died.
    """
    receiver, sender = multiprocessing.Pipe()
    context = context or multiprocessing.get_context("spawn")
    process = context.Process(target=_run, args=(program, sender))
    before, peak_mb = records.cores(), 0.0
    os.sched_setaffinity(0, cores)  # inherited by the new process
    try:
        process.start()
    finally:
        os.sched_setaffinity(0, before)
    sender.close()
    try:
        while not receiver.poll(SAMPLING_S):
            peak_mb = max(peak_mb, memory_mb(process.pid))
        result = receiver.recv()
    except EOFError:
        result = RuntimeError(f"its process ended with exit code {process.exitcode}")
    finally:
        _end(process)
    if isinstance(result, RuntimeError):
        raise result
    return result, peak_mb


def run_limited(
    program: Callable[[], Any],
    num_ranks: int,
    log: Path,
    limit_s: float,
    context: Any = None,
) -> list[int | None]:
    """Run a function in one or more new processes; return their exit codes, None after a timeout.

    Args:
        program: picklable function. Child processes that it leaves are killed.
        num_ranks: number of processes with torchrun's environment variables; 0: one without them.
        log: file to which the output is appended.
        limit_s: time limit in seconds for all processes together.
        context: `multiprocessing` context that starts the processes; default: spawn.
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


def _run(program: Callable[[], Any], sender: Connection) -> None:
    # Worker processes of the program start by the platform's default method.
    multiprocessing.set_start_method(None, force=True)
    try:
        sender.send(program())
        sender.poll(None)  # keep the process and its memory until it is killed
    except Exception as error:
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _end(process: BaseProcess) -> None:
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.join()


def memory_mb(pid: int | None) -> float:
    """Memory of a process and its children in MB, without file pages; shared pages count once."""
    kb = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(OSError):
                text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
                kb += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", text, re.M)))
    return kb * 1024 / 1e6
