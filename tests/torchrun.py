"""torchrun quickly: its agent and ranks are forked, which leaves out Python's starts, 8 s each."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.helpers import ENVIRONMENT, FORKSERVER, print_to

TWO_RANKS = ["--standalone", "--nproc_per_node=2"]
FORKED = ["--run-path", "--start-method=fork"]


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
    process = FORKSERVER.Process(
        target=_agent,
        args=(arguments, folder, prints, ENVIRONMENT | (env or {}), is_forked, is_elastic),
    )
    process.start()
    return process


def _agent(
    arguments: list[str],
    folder: Path,
    prints: Path,
    env: dict[str, str],
    is_forked: bool,
    is_elastic: bool,
) -> None:
    os.chdir(folder)
    print_to(prints)
    if not is_forked:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        os.execve(sys.executable, command, {**os.environ, **env})
    # A torchrun that is killed leaves semaphores, of which a process that outlives it would warn.
    os.environ.update(
        env | {"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
    )
    sys.path.insert(0, str(folder))
    os.register_at_fork(after_in_child=_reset_signals)
    from torch.distributed import run

    main: Callable[[list[str]], Any] = run.main
    if is_elastic:  # part: elastic
        from launch import elastic_torchrun

        main = elastic_torchrun.main
    main([*FORKED, *arguments])


def _reset_signals() -> None:
    """Handle signals as a Python that has just started does, not as the agent."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
