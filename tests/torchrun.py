"""torchrun quickly: its agent and its ranks are forked from a process that has imported torch.

All that torchrun does is done by torchrun; only the starts of Python, 8 s each, are left out.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.helpers import ENVIRONMENT, FORKSERVER, REPOSITORY

TWO_RANKS = ["--standalone", "--nproc_per_node=2"]
COMMAND = [sys.executable, "-m", "torch.distributed.run"]


def torchrun(
    arguments: list[str],
    folder: Path,
    prints: Path,
    env: dict[str, str] | None = None,
    *,
    is_forked: bool = True,
    is_elastic: bool = False,
) -> ForkServerProcess:
    """Start torchrun with these arguments in this folder; what it prints goes to a file.

    Args:
        is_elastic: by `launch/elastic_torchrun.py`.
        is_forked: otherwise the agent and the ranks are Pythons of their own, as a user's.
    """
    is_forked = is_forked and sys.platform == "linux"  # for /proc/self/fd
    process = FORKSERVER.Process(
        target=_agent,
        args=(arguments, folder, prints, ENVIRONMENT | (env or {}), is_forked, is_elastic),
    )
    process.start()
    return process


def train_with_torchrun(script: str, output_dir: Path, *overrides: str) -> str:
    """Run an entry point on two ranks to its end; returns what they printed."""
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    prints = output_dir.with_name(f"{output_dir.name}-{script}.txt")
    arguments = [*TWO_RANKS, script, f"output_dir={output_dir}", *overrides]
    process = torchrun(arguments, REPOSITORY, prints)
    process.join(240)
    assert process.exitcode == 0, prints.read_text()
    return prints.read_text()


def _agent(
    arguments: list[str],
    folder: Path,
    prints: Path,
    env: dict[str, str],
    is_forked: bool,
    is_elastic: bool,
) -> None:
    os.chdir(folder)
    file = os.open(prints, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if not is_forked:
        os.execve(sys.executable, [*COMMAND, *arguments], {**os.environ, **env})
    os.environ.update(env)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from launch import elastic_torchrun

    subprocess_handler.Popen = _Rank  # type: ignore[misc]
    try:
        (elastic_torchrun if is_elastic else run).main(arguments)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


class _Rank(subprocess.Popen):
    """A process that torchrun starts, forked from torchrun itself."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        env = others[5]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = _rank(list(args), env)
            finally:
                os._exit(code)
        self._child_created = True


def _rank(command: list[str], env: dict[str, str]) -> int:
    """Run a script as a Python that was started with this command would; returns its exit code."""
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.close(int(fd))  # of the agent's store, which has to end with the agent
    os.environ.update(env)
    faulthandler.enable()
    multiprocessing.set_start_method("fork", force=True)  # as in a process of the user's
    _, _, *sys.argv = command  # python -u script ...
    sys.path.insert(0, os.getcwd())
    code: Any = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code if isinstance(code, int) else int(code is not None)
