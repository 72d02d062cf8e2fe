"""torchrun quickly: its agent and ranks are forked, which leaves out Python's starts, 8 s each."""

import os
import re
import signal
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from unittest import mock

from torch.distributed import run

from tests.helpers import script_for
from tests.processes import ENVIRONMENT, print_to, start_process, wait_for

TWO_RANKS = ["--standalone", "--nproc_per_node=2"]


class Torchrun(AbstractContextManager["Torchrun"]):
    """torchrun, all of whose processes can be found; none is left at the end of a `with` block."""

    def __init__(self, arguments: list[str], folder: Path, prints: Path) -> None:
        """Start it in a folder; all its processes print to a file."""
        self.prints = prints
        # In full: workers of a loader look for the script where the tests were started.
        scripts = {name: str(folder / script_for(name, folder)) for name in arguments}
        arguments = [scripts[x] if re.fullmatch(r"train\w*\.py", x) else x for x in arguments]
        self.agent = start_process(_agent, arguments, folder, prints, dict(ENVIRONMENT))

    def __exit__(self, *unused: object) -> None:
        self.agent.kill()
        self.agent.join()
        for process in self.processes():
            with suppress(ProcessLookupError):  # it has ended
                os.kill(process, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Those of the agent, its ranks and their workers that live: all that print to its file."""
        ours = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # it has ended
                if os.readlink(f"/proc/{process}/fd/1") == os.path.realpath(self.prints):
                    ours.append(int(process))
        return ours

    def wait(self) -> int:
        """The exit code, when no process is left."""
        what = f"the end of all that print to {self.prints}"
        wait_for(lambda: not self.agent.is_alive() and not self.processes(), what)
        self.agent.join()
        assert self.agent.exitcode is not None
        return self.agent.exitcode

    def text(self) -> str:
        return self.prints.read_text()


def _agent(arguments: list[str], folder: Path, prints: Path, env: dict[str, str]) -> None:
    """Become the launcher."""
    os.chdir(folder)
    print_to(prints)
    # A torchrun that is killed leaves semaphores, of which a process that outlives it would warn.
    warnings = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ.update(env, PYTHONWARNINGS=warnings)
    sys.path.insert(0, str(folder))
    os.register_at_fork(after_in_child=_reset_signals)
    # Ranks that torchrun forks, it lets have SIGINT when one of its threads ends: up to three if it
    # is killed. Linux sends nothing to those of a user, which it starts as Pythons of their own.
    with mock.patch("torch.multiprocessing.spawn._prctl_pr_set_pdeathsig"):
        run.main(["--run-path", "--start-method=fork", *arguments])


def _reset_signals() -> None:
    """Handle signals as a Python that has just started does, not as the agent."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
