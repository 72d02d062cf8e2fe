"""Machines that come and go: the launcher in `launch/`."""

import json
import signal
from contextlib import ExitStack

import pytest

from launch import rendezvous
from tests.faults import recording, seen_by
from tests.helpers import (
    REPOSITORY,
    free_port,
    scalars_of,
    start_process,
    train,
    wait_for,
    weights_differ_by,
)
from tests.torchrun import Torchrun

LAUNCHER = "launch.elastic_torchrun"
GLOBAL_BATCH_SIZE = 8
HELD = ["from runtime import preemption", "is_free = preemption.is_requested"]
HELD += ["while not (is_free() or os.path.exists(str(run.group.world_size))): time.sleep(0.05)"]
"""Ranks wait in a step until the test lets a group of their size go on, or a signal ends it."""


def test_machines_and_the_rendezvous_come_and_go_but_no_step(options, tmp_path) -> None:
    """A run of one process makes the same steps."""
    run, whole, port = tmp_path / "run", tmp_path / "whole", free_port()
    options = [*options, "model.kwargs.batch_norm=false"]  # which depends on the number of ranks
    one_process = recording(tmp_path / "one", "train.py")
    train("train.py", whole, *options, folder=one_process)
    script = recording(tmp_path / "s", "train_ddp.py", "time.sleep(0.5)", *HELD)
    (seen := script / "seen.txt").touch()
    launcher = ["--nnodes=1:2", "--nproc_per_node=1", f"--rdzv_endpoint=127.0.0.1:{port}"]
    launcher += ["--rdzv_id=test", "--local_addr=127.0.0.1", "--max-restarts=9"]
    launcher += ["--rdzv_conf=last_call_timeout=1,keep_alive_interval=1"]
    command = [*launcher, "train_ddp.py", f"output_dir={run}", *options, "resume=auto"]

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
            started = Torchrun(command, script, tmp_path / f"{name}.txt", launcher=LAUNCHER)
            return stack.enter_context(started)

        place = start_process(rendezvous.main, [str(port)])
        one, other = machine("one"), machine("other")
        wait_for_ranks(2)
        let_go(2)  # a rank that waits in its step does not notice that another has gone
        other.agent.kill()
        wait_for_ranks(1)
        another = machine("another")
        wait_for_ranks(2)
        place.kill()
        place.join()
        wait_for(lambda: "again: nothing answers there" in one.text(), "the loss to be told")
        place = start_process(rendezvous.main, [str(port)])
        wait_for_ranks(2)
        let_go(1, 2)
        one.agent.terminate()
        assert one.wait() == 128 + signal.SIGTERM
        assert another.wait() == 0, another.text()
        text = one.text() + another.text()  # a torchrun that forks its ranks adds where it noticed
        for trace in ("\nTraceback", "[rank 0] Traceback", "[rank 1] Traceback"):
            assert trace not in text, text
        assert text.count("epoch 2 of 2:") == 1
        late = machine("late")
        assert late.wait() == 1
        assert "--rdzv_id=test has ended" in late.text()
    assert seen_by(script) == seen_by(one_process)  # disjoint and complete in each epoch
    for tag in ("train/loss", "val/loss"):
        expected = [(step, pytest.approx(loss, abs=1e-4)) for step, loss in scalars_of(whole, tag)]
        assert scalars_of(run, tag) == expected
    assert weights_differ_by(run, whole) < 1e-3
    assert (run / "train.log").read_text().count("epoch 2 of 2:") == 1


def test_an_elastic_torchrun_exits_as_a_rank_that_met_a_mistake(tmp_path) -> None:
    port = free_port()
    start_process(rendezvous.main, [str(port)])
    command = ["--nnodes=1:1", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=mine"]
    command += ["--max-restarts=0", "train_ddp.py", "epochs=0", f"output_dir={tmp_path / 'run'}"]
    with Torchrun(command, REPOSITORY, tmp_path / "prints", launcher=LAUNCHER) as torchrun:
        assert torchrun.wait() == 2, torchrun.text()
        assert "epochs=0" in torchrun.text()
