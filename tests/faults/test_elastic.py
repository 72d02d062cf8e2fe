"""Machines that come and go, by the command of `docs/elastic.md`."""

import json
import re
from contextlib import ExitStack

import psutil
import pytest

from tests.faults import recording
from tests.helpers import (
    ENVIRONMENT,
    REPOSITORY,
    free_port,
    scalars_of,
    train,
    wait_for,
    weights_differ_by,
)
from tests.torchrun import Torchrun

GLOBAL_BATCH_SIZE = 8
HELD = ["from runtime import preemption", "is_free = preemption.is_requested"]
HELD += ["while not (is_free() or os.path.exists(str(run.group.world_size))): time.sleep(0.05)"]
"""Ranks wait in a step until the test lets a group of their size go on, or a signal ends it."""


def documented(**values: str) -> tuple[dict[str, str], list[str]]:
    """Variables and options of torchrun of the command on the page, with these values."""
    page = (REPOSITORY / "docs" / "elastic.md").read_text()
    command = re.search(r"^(\w+)=(\S+) torchrun (.*?)train_ddp.py", page, re.MULTILINE | re.DOTALL)
    assert command is not None
    options = dict(word.split("=") for word in command[3].replace("\\", "").split())
    given = {f"--{name}": value for name, value in values.items()}
    assert given.keys() <= options.keys()
    return {command[1]: command[2]}, [f"{name}={x}" for name, x in (options | given).items()]


def test_a_machine_leaves_and_comes_back_but_no_step_does(options, tmp_path) -> None:
    """A run of one process has the same losses and weights: what was lost with a machine is trained
    again. The other machine is lost once, and leaves once by a signal; the first one has the
    rendezvous."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = [*options, "model.kwargs.batch_norm=false"]  # which depends on the number of ranks
    train("train.py", whole, *options)
    script = recording(tmp_path / "s", "train_ddp.py", "time.sleep(0.5)", *HELD)
    (seen := script / "seen.txt").touch()
    place = f"127.0.0.1:{free_port()}"
    variables, launcher = documented(nnodes="1:2", nproc_per_node="1", rdzv_endpoint=place)
    launcher += ["--local_addr=127.0.0.1", "--rdzv_conf=last_call_timeout=1,keep_alive_interval=1"]
    command = [*launcher, "train_ddp.py", f"output_dir={run}", *options, "resume=auto"]
    command += ["checkpoint.every_steps=1"]

    def steps_of(count: int) -> set[int]:
        """The steps that so many ranks have begun."""
        lines = map(json.loads, seen.read_text().splitlines())
        return {step for step, _, samples in lines if len(samples) * count == GLOBAL_BATCH_SIZE}

    def wait_for_ranks(count: int) -> None:
        """Until so many ranks have begun a step more, in which they wait then."""
        before = steps_of(count)
        let_go(count)
        wait_for(lambda: steps_of(count) > before, f"a step of {count} ranks")
        (script / str(count)).unlink()

    def let_go(*counts: int) -> None:
        for count in counts:
            (script / str(count)).touch()

    with ExitStack() as stack:

        def machine(name: str) -> Torchrun:
            prints = tmp_path / f"{name}.txt"
            started = Torchrun(command, script, prints, env=ENVIRONMENT | variables)
            return stack.enter_context(started)

        first, other = machine("first"), machine("other")
        wait_for_ranks(2)
        let_go(2)  # a rank that waits in its step does not notice that another has gone
        lost = psutil.Process(other.agent.pid)
        for process in (lost, *lost.children(recursive=True)):  # as when its machine is lost
            process.kill()
        wait_for_ranks(1)
        another = machine("another")
        wait_for_ranks(2)
        let_go(2)
        another.agent.terminate()
        wait_for_ranks(1)
        third = machine("third")
        wait_for_ranks(2)
        let_go(1, 2)
        assert first.wait() == 0, first.text()
        assert third.wait() == 0, third.text()
        assert another.wait() != 0
    for tag in ("train/loss", "val/loss"):
        expected = [(step, pytest.approx(loss, abs=1e-4)) for step, loss in scalars_of(whole, tag)]
        assert scalars_of(run, tag) == expected
    assert weights_differ_by(run, whole) < 1e-3
    assert (run / "train.log").read_text().count("epoch 2 of 2:") == 1
