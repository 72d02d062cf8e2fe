"""Machines that come and go, by the command of docs/machines.md."""

from contextlib import ExitStack

import psutil
import pytest

from tests.helpers import folder_with
from tests.processes import ENVIRONMENT, free_port, train, wait_for
from tests.results import scalars_of, weights_differ_by
from tests.torchrun import Torchrun

HELD = ["world_size = run.group.world_size"]
HELD += ["open(f'step {step} of {world_size}', 'w').close()"]
HELD += ["while not (run._is_signalled() or os.path.exists(f'free {world_size}')):"]
HELD += ["    time.sleep(0.05)"]
"""Ranks wait in a step until the test lets a group of their size go on, or a signal ends it."""

RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"


def test_a_machine_is_lost_and_another_comes_but_no_step_goes(
    options, tmp_path, monkeypatch
) -> None:
    """A run of one process has the same losses and weights: what was lost with the machine is
    trained again. The machine that stays has the rendezvous."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    # Batch normalisation depends on the number of ranks; bfloat16 rounds each rank's part.
    options = [*options, "model.kwargs.batch_norm=false", "amp.dtype=float32"]
    train("train.py", whole, *options)
    script = folder_with(tmp_path / "s", "train_ddp.py", loop=HELD)
    port = free_port()
    monkeypatch.setitem(ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    launcher = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3"]
    launcher += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=mine"]
    # On a busy machine, one that stays may be silent for some seconds.
    launcher += ["--local_addr=127.0.0.1", f"--rdzv_conf={RENDEZVOUS}"]
    command = [*launcher, "train_ddp.py", f"output_dir={run}", *options, "resume=auto"]
    command += ["checkpoint.every_steps=1"]

    def has_rendezvous() -> bool:
        connections = psutil.net_connections("tcp")
        return any(each.status == "LISTEN" and each.laddr.port == port for each in connections)

    def wait_for_ranks(count: int) -> None:
        """Until so many ranks have begun a step more, in which they wait then."""
        before = {*script.glob(f"step * of {count}")}
        (free := script / f"free {count}").touch()
        wait_for(lambda: {*script.glob(f"step * of {count}")} - before, f"a step of {count} ranks")
        free.unlink()

    with ExitStack() as stack:

        def machine(name: str) -> Torchrun:
            return stack.enter_context(Torchrun(command, script, tmp_path / f"{name}.txt"))

        first = machine("first")
        wait_for(has_rendezvous, "the rendezvous")
        other = machine("other")
        wait_for_ranks(2)
        lost = psutil.Process(other.agent.pid)
        for process in (lost, *lost.children(recursive=True)):
            process.kill()
        # A rank that waits in its step does not notice that another is gone.
        (script / "free 2").touch()
        wait_for_ranks(1)
        another = machine("another")
        wait_for_ranks(2)
        for count in (1, 2):
            (script / f"free {count}").touch()
        assert first.wait() == 0, first.text()
        assert another.wait() == 0, another.text()
    for tag in ("train/loss", "val/loss"):
        expected = [(step, pytest.approx(loss, abs=1e-4)) for step, loss in scalars_of(whole, tag)]
        assert scalars_of(run, tag) == expected
    assert weights_differ_by(run, whole) < 1e-3
    assert (run / "train.log").read_text().count("epoch 2 of 2:") == 1
