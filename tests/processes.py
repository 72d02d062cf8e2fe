"""Entry points and other commands in processes of their own, which are forked: quick to start."""

import multiprocessing
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import REPOSITORY, folder_with, has_ranks, must_be_merged, script_for

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

LIMIT_S = 240.0
"""For what would not come at all: no test is about how long something takes."""

STARTED: list[ForkServerProcess] = []
"""By the current test; conftest.py kills those that are left after it."""

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.preload"])  # conftest.py starts it


def wait_for(condition: Callable[[], Any], what: str, timeout: float = LIMIT_S) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.05)


def join(processes: Sequence[ForkServerProcess], timeout: float = LIMIT_S) -> list[int | None]:
    """Exit codes of processes; of those that did not end in time, that of a kill."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def start_process(function: Callable[..., Any], *args: Any, **options: Any) -> ForkServerProcess:
    """Call a function in a process of its own, which ends with the test at the latest."""
    process = FORKSERVER.Process(target=function, args=args, kwargs=options)
    STARTED.append(process)
    process.start()
    return process


def free_port() -> int:
    """A port below those that the system gives to connections of other programs meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def print_to(path: Path) -> None:
    """Lead what this process prints to the end of a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for printed in (1, 2):
        os.dup2(file, printed)


def run_as_main(
    command: list[str], env: dict[str, str], prints: Path, folder: Path = REPOSITORY
) -> None:
    """Run a command line, as after `python`, in this process, which prints to a file."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    if not (folder / "conf").samefile(REPOSITORY / "conf"):  # the modules are a project's own
        for module in list(sys.modules):
            if (REPOSITORY / module.partition(".")[0]).exists():
                del sys.modules[module]
    os.environ.update(env)
    prints.unlink(missing_ok=True)
    print_to(prints)
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(command[0]), run_name="__main__")


def start(
    command: list[str], prints: Path, num_ranks: int | None = None, folder: Path = REPOSITORY
) -> tuple[list[ForkServerProcess], list[Path]]:
    """Start a command line, as after `python`, on each rank of a group, on the CPU.

    Returns:
        The process of each rank, forked, and the file `PRINTS-RANK.txt` that it prints to;
        with `num_ranks=None` the one that `python` starts.
    """
    prints.parent.mkdir(parents=True, exist_ok=True)
    script, env = script_for(command[0], folder), dict(ENVIRONMENT)
    if num_ranks is not None:
        env |= {"WORLD_SIZE": f"{num_ranks}", "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(free_port())
    paths = [prints.with_name(f"{prints.name}-{rank}.txt") for rank in range(num_ranks or 1)]
    processes = []
    for rank, path in enumerate(paths):
        ranks = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if num_ranks is not None else {}
        arguments = [script, *command[1:]], env | ranks, path, folder
        processes.append(start_process(run_as_main, *arguments))
    return processes, paths


def finish(processes: Sequence[ForkServerProcess], prints: Sequence[Path], code: int) -> str:
    """Wait for all ranks, which end with this exit code; returns what rank 0 printed."""
    codes, texts = join(processes), [path.read_text() for path in prints]
    assert set(codes) == {code}, "\n".join([f"{codes}", *texts])
    return texts[0]


def execute(
    command: list[str],
    prints: Path,
    num_ranks: int = 1,
    folder: Path = REPOSITORY,
    code: int = 0,
) -> str:
    """Run what `start()` starts to its end, with this exit code; returns what rank 0 printed."""
    return finish(*start(command, prints, num_ranks if num_ranks > 1 else None, folder), code)


def fork(
    script: str,
    output_dir: Path,
    *overrides: str,
    folder: Path | None = None,
    num_ranks: int | None = None,
    loop: Sequence[str] = (),
    edits: Sequence[tuple[str, str]] = (),
) -> tuple[list[ForkServerProcess], list[Path]]:
    """Start an entry point as `start()` does, by default on two ranks if it has any.

    A script with `loop` or `edits`, as of `folder_with()`, and one that must be merged, lies in a
    folder beside the run's, where it is found again when the run goes on.
    """
    if folder is None:
        folder = REPOSITORY
        if loop or edits or must_be_merged(script):
            place = output_dir.with_name(f"{output_dir.name} of {script}")
            folder = folder_with(place, script, *edits, loop=loop)
    command = [script, f"output_dir={output_dir}", *overrides]
    prints = output_dir.with_name(f"{output_dir.name}-{script}")
    return start(command, prints, num_ranks or (2 if has_ranks(script) else None), folder)


def run_to_end(*arguments: Any, **options: Any) -> tuple[list[int | None], list[str]]:
    """Exit codes and prints of all ranks that `fork()` starts."""
    processes, prints = fork(*arguments, **options)
    return join(processes), [path.read_text() for path in prints]


def train(script: str, output_dir: Path, *overrides: str, code: int = 0, **options: Any) -> str:
    """Run what `fork()` starts to its end, with this exit code; returns what rank 0 printed."""
    return finish(*fork(script, output_dir, *overrides, **options), code)


def without_reader(*command: str) -> tuple[int, bytes]:
    """Exit code and errors of a command line that prints to a pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    python = [sys.executable, *command]
    done = subprocess.run(python, cwd=REPOSITORY, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    return done.returncode, done.stderr


def workers_of(training: psutil.Process) -> list[psutil.Process]:
    """The DataLoader's, which are children of the process that they are forked from."""
    return [worker for child in training.children() for worker in child.children()]


@contextmanager
def signal_handlers_restored() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
