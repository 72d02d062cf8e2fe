"""Signals to torchrun and its ranks, and processes that are killed with SIGKILL, which nobody can catch."""

import signal

import pytest

from runtime.run import REQUEUE_MARKER
from tests.faults.helpers import (
    NUM_STEPS,
    TWO_RANKS,
    Torchrun,
    assert_same_state,
    hit,
    script_with,
    steps_saved,
    wait_for,
)
from tests.helpers import REPOSITORY, checkpoint_of, scalars_of, summary_of, train


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """Output folder of an uninterrupted run of train_ddp.py."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train("train_ddp.py", folder, *options)
    return folder


@pytest.fixture
def frequent(options) -> list[str]:
    return [*options, "checkpoint.every_steps=1", "resume=auto"]


def test_a_killed_worker_and_a_killed_rank_come_back_with_the_same_weights(
    whole, frequent, tmp_path
) -> None:
    run, script = tmp_path / "run", "train_ddp.py"
    worker = "import psutil, tests.helpers; tests.helpers.workers_of(psutil.Process())[0].kill()"
    killed = hit(tmp_path / "worker", 3, 1, worker)
    killed += hit(tmp_path / "rank", 9, 0, f"os.kill(os.getpid(), {signal.SIGKILL:d})")
    folder = script_with(tmp_path / "s", script, *killed)
    launcher, options = [*TWO_RANKS, "--max-restarts=3"], [*frequent, "loader.num_workers=1"]
    with Torchrun(folder, run, script, launcher, *options) as torchrun:
        assert torchrun.wait() == 0, torchrun.text()
    assert torchrun.text().count("resumed from") == 2
    assert_same_state(run, whole)
    assert scalars_of(run, "train/loss") == scalars_of(whole, "train/loss")
    assert summary_of(run)["steps"] == NUM_STEPS


@pytest.mark.parametrize(("target", "num_workers"), [("getppid", 1), ("getpid", 0)])
def test_a_signal_to_torchrun_or_one_rank_saves_one_common_step_and_leaves_no_process(
    target: str, num_workers: int, whole, frequent, tmp_path
) -> None:
    """First SIGTERM; then SIGKILL, after which the ranks save if it was torchrun's."""
    run, script = tmp_path / "run", "train_ddp.py"
    lines = ["from runtime import preemption"]
    for step, number in ((3, signal.SIGTERM), (7, signal.SIGKILL)):
        lines += hit(tmp_path / f"hit{step}", step, 1, f"os.kill(os.{target}(), {number:d})")
        lines.append("    while not preemption.is_requested(): time.sleep(0.01)")
    folder = script_with(tmp_path / "s", script, *lines)
    options = [*frequent, f"loader.num_workers={num_workers}"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        is_rank_killed = (number, target) == (signal.SIGKILL, "getpid")
        job = folder, run, script, TWO_RANKS, *options
        # A torchrun that forks its ranks names any of those that have ended.
        with Torchrun(*job, is_forked=not is_rank_killed) as torchrun:
            assert torchrun.wait() != 0
        text, step = torchrun.text(), checkpoint_of(run)["step"]
        if is_rank_killed:
            assert step == 6
            assert "[rank 0] stops, because another rank has:" in text
            assert "rank      : 1 (local_rank: 1)" in text  # torchrun's summary
            assert f"exitcode  : -{number:d}" in text
        else:
            assert step in ((3, 4) if number == signal.SIGTERM else (7, 8)), text
            assert text.count(f"stopped by a signal: saved at step {step}") == 1
            assert (run / REQUEUE_MARKER).exists()
    train(script, run, *frequent)
    assert_same_state(run, whole)
    assert not (run / REQUEUE_MARKER).exists()


def test_an_agent_killed_while_its_ranks_start_leaves_none_of_them(options, tmp_path) -> None:
    """A Python that really starts looks after its launcher once torch is imported."""
    job = REPOSITORY, tmp_path / "run", "train_ddp.py", TWO_RANKS
    with Torchrun(*job, *options, is_forked=False) as torchrun:
        wait_for(lambda: len(torchrun.processes()) == 3, "two ranks")
        torchrun.agent.kill()
        torchrun.all_gone()
    assert not steps_saved(tmp_path / "run")
