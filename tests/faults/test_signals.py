"""Signals that ask a run to leave."""

import signal

import pytest

from runtime.preemption import EXIT_CODE, REQUEUE_MARKER
from tests.faults.helpers import (
    NUM_STEPS,
    TWO_RANKS,
    Torchrun,
    assert_same_state,
    join,
    script_with,
    send,
    slow,
    steps_saved,
    wait_for_step,
)
from tests.helpers import checkpoint_of, fork, train, workers_of


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """Output folder of an uninterrupted run of train.py."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train("train.py", folder, *options)
    return folder


def test_each_signal_saves_the_last_step_and_the_resumed_run_has_the_same_bits(
    whole, options, tmp_path
) -> None:
    run, folder = tmp_path / "run", slow(tmp_path / "s", "train.py")
    every_step, before = [*options, "checkpoint.every_steps=1", "resume=auto"], 0
    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        [process], [prints] = fork("train.py", run, *every_step, folder=folder)
        wait_for_step(run, before + 2)
        send(process, getattr(signal, name))
        assert join([process]) == [EXIT_CODE], prints.read_text()
        step = checkpoint_of(run)["step"]
        assert before + 2 <= step < NUM_STEPS
        line = f"stopped by a signal: saved at step {step}; go on with output_dir={run}"
        assert line in prints.read_text()
        assert (run / REQUEUE_MARKER).exists()
        assert not (run / "summary.json").exists()
        before = step

    train("train.py", run, *every_step)
    assert_same_state(run, whole)
    assert not (run / REQUEUE_MARKER).exists()


def test_a_second_ctrl_c_stops_at_once(options, tmp_path) -> None:
    """The first one waits for the end of a step that takes for ever."""
    folder = script_with(tmp_path / "s", "train.py", "step == 3 and time.sleep(1000)")
    run = tmp_path / "run"
    [process], [prints] = fork("train.py", run, *options, "checkpoint.every_steps=1", folder=folder)
    wait_for_step(run, 2)
    send(process, signal.SIGINT)
    process.join(2)
    assert process.is_alive()
    send(process, signal.SIGINT)
    [code] = join([process])
    assert code not in (None, 0, EXIT_CODE)
    assert "KeyboardInterrupt" in prints.read_text()
    assert steps_saved(run)[-1] == 2


@pytest.fixture(scope="module")
def whole_ddp(options, tmp_path_factory):
    """Output folder of an uninterrupted run of train_ddp.py."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train("train_ddp.py", folder, *options)
    return folder


@pytest.mark.parametrize(("target", "num_workers"), [("agent", 1), ("rank 1", 0)])
def test_sigterm_under_torchrun_saves_one_common_step_and_leaves_no_process(
    target: str, num_workers: int, whole_ddp, options, tmp_path
) -> None:
    run, folder = tmp_path / "run", slow(tmp_path / "s", "train_ddp.py", 0.2)
    overrides = [*options, "resume=auto"]
    frequent = [*overrides, f"loader.num_workers={num_workers}", "checkpoint.every_steps=2"]
    with Torchrun(folder, run, "train_ddp.py", TWO_RANKS, *frequent) as torchrun:
        wait_for_step(run, 4)
        workers = [worker for rank in (0, 1) for worker in workers_of(torchrun.rank(rank))]
        assert len(workers) == 2 * num_workers
        victim = torchrun.agent if target == "agent" else torchrun.rank(1)
        send(victim, signal.SIGTERM)
        assert torchrun.wait() != 0
        torchrun.all_gone()
    step = checkpoint_of(run)["step"]
    assert 4 <= step < NUM_STEPS
    assert torchrun.text().count(f"stopped by a signal: saved at step {step}") == 1
    assert (run / REQUEUE_MARKER).exists()

    train("train_ddp.py", run, *overrides)
    assert_same_state(run, whole_ddp)
    assert not (run / REQUEUE_MARKER).exists()
