"""What the tests of faults need: runs that can be hit, scripts with a fault put in, and comparisons."""

import os
import re
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.helpers import REPOSITORY, checkpoint_of, folder_with, fork
from tests.torchrun import TWO_RANKS as TWO_RANKS
from tests.torchrun import torchrun

LIMIT_S = 240.0
"""For what would not come at all: no test is about how long something takes."""

NUM_TRAIN = 64
NUM_STEPS = 16

SAVED = ("model", "optimizer", "scheduler", "scaler", "ema", "loader", "guard", "rng")
"""All that decides how a run goes on; the rest of a checkpoint tells what was."""

LOOP = re.compile(r"^ {8}for inputs, targets in run\.batches\(.*\):\n", re.MULTILINE)


def script_with(folder: Path, script: str, *lines: str) -> Path:
    """A folder like the repository's, with these lines put in at the top of the training loop.

    `step` counts the steps from 1 there, and `rank` is the number of the process.
    """
    path = folder_with(folder, script) / script
    added = ["step, rank = run.step_number + 1, run.group.rank", *lines]
    indented = "".join(f"            {line}\n" for line in added)
    text, count = LOOP.subn(lambda loop: loop[0] + indented, path.read_text())
    assert count == 1
    path.write_text("import os\nimport time\n" + text)
    return folder


def slow(folder: Path, script: str, seconds: float = 0.1) -> Path:
    """The script with steps that last long enough to be hit."""
    return script_with(folder, script, f"time.sleep({seconds})")


def wait_for(condition: Callable[[], Any], what: str, timeout: float = LIMIT_S) -> Any:
    end = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.02)
    return answer


def steps_saved(output_dir: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (output_dir / "checkpoints").glob("step-*.pt"))


def wait_for_step(output_dir: Path, step: int, timeout: float = LIMIT_S) -> None:
    """Until a checkpoint of this step or a later one is there."""
    wait_for(lambda: any(s >= step for s in steps_saved(output_dir)), f"step {step}", timeout)


def run_to_end(
    script: str,
    output_dir: Path,
    *overrides: str,
    folder: Path = REPOSITORY,
    num_ranks: int | None = None,
    timeout: float = LIMIT_S,
) -> tuple[list[int | None], list[str]]:
    """Exit codes and prints of all ranks."""
    processes, prints = fork(script, output_dir, *overrides, folder=folder, num_ranks=num_ranks)
    return join(processes, timeout), [path.read_text() for path in prints]


def send(process: ForkServerProcess | psutil.Process, number: int) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def join(processes: list[ForkServerProcess], timeout: float = LIMIT_S) -> list[int | None]:
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Torchrun:
    """An entry point under torchrun, all of whose processes can be found."""

    def __init__(
        self,
        folder: Path,
        output_dir: Path,
        script: str,
        launcher: list[str],
        *overrides: str,
        environment: dict[str, str] | None = None,
        is_forked: bool = True,
        is_elastic: bool = False,
    ) -> None:
        self.prints = output_dir.with_name(f"{output_dir.name}-{uuid.uuid4().hex[:6]}.txt")
        self.agent = torchrun(
            [*launcher, script, f"output_dir={output_dir}", *overrides],
            folder,
            self.prints,
            {"PYTHONFAULTHANDLER": "1", **(environment or {})},
            is_forked=is_forked,
            is_elastic=is_elastic,
        )
        self.seen = {psutil.Process(self.agent.pid)}

    def __enter__(self) -> "Torchrun":
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self.processes():
            process.kill()
        self.agent.kill()
        self.agent.join()

    def processes(self) -> list[psutil.Process]:
        """The agent, its ranks and their workers, as far as they live."""
        for process in list(self.seen):
            with suppress(psutil.NoSuchProcess):
                self.seen.update(process.children(recursive=True))
        return [process for process in self.seen if is_alive(process)]

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank, which the agent starts one after the other."""

        def find() -> psutil.Process | None:
            children = psutil.Process(self.agent.pid).children()
            alive = sorted(filter(is_alive, children), key=lambda process: process.pid)
            return alive[rank] if rank < len(alive) else None

        return wait_for(find, f"rank {rank}")

    def kill_agent(self) -> None:
        self.processes()  # which later cannot be found by their parent
        self.agent.kill()

    def wait(self, timeout: float = LIMIT_S) -> int:
        return wait_for_end(self, timeout=timeout)[0]

    def all_gone(self, timeout: float = LIMIT_S) -> None:
        """Wait until no process is left; otherwise say where each of them stands."""
        try:
            wait_for(lambda: not self.processes(), "the end of all processes", timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text_with_stacks()}") from error

    def text_with_stacks(self) -> str:
        """What was printed and where each process stands; it ends them."""
        for process in self.processes():
            process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
            time.sleep(0.5)
        return self.text()

    def text(self) -> str:
        return self.prints.read_text()


def wait_for_end(*launchers: Torchrun, timeout: float = LIMIT_S) -> list[int]:
    """The exit codes; if one of them hangs, where all processes stand."""
    try:
        wait_for(lambda: not any(one.agent.is_alive() for one in launchers), "the end", timeout)
    except AssertionError as error:
        texts = [launcher.text_with_stacks() for launcher in launchers]
        raise AssertionError("\n".join([str(error), *texts])) from error
    return [launcher.agent.exitcode or 0 for launcher in launchers]


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal to the last bit, all tensors in them included."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}/{number}")
    else:
        assert one == other, where


def assert_same_state(one: Path, other: Path) -> None:
    """The newest checkpoints of two runs are equal in all that decides how a run goes on."""
    first, second = checkpoint_of(one), checkpoint_of(other)
    assert first["step"] == second["step"]
    for name in SAVED:
        assert_same(first.get(name), second.get(name), name)
