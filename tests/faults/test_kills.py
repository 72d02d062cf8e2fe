"""Processes that are killed with SIGKILL, which nobody can catch."""

import signal

import pytest

from tests.faults.helpers import (
    NUM_STEPS,
    TWO_RANKS,
    Torchrun,
    assert_same_state,
    slow,
    steps_saved,
    wait_for_step,
)
from tests.helpers import REPOSITORY, scalars_of, summary_of, train, workers_of


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
    run, folder = tmp_path / "run", slow(tmp_path / "s", "train_ddp.py", 0.3)
    launcher = [*TWO_RANKS, "--max-restarts=3"]
    workers = [*frequent, "loader.num_workers=1"]
    with Torchrun(folder, run, "train_ddp.py", launcher, *workers) as torchrun:
        for rank, what, step in ((1, "worker", 3), (0, "rank", 9)):
            wait_for_step(run, step)
            assert steps_saved(run)[-1] < NUM_STEPS
            victim = torchrun.rank(rank)
            (victim if what == "rank" else workers_of(victim)[0]).kill()
        assert torchrun.wait() == 0, torchrun.text()
        torchrun.all_gone()
    assert torchrun.text().count("resumed from") == 2
    assert_same_state(run, whole)
    assert scalars_of(run, "train/loss") == scalars_of(whole, "train/loss")
    assert summary_of(run)["steps"] == NUM_STEPS


def test_a_killed_agent_takes_its_ranks_with_it_and_the_run_goes_on_later(
    whole, frequent, tmp_path
) -> None:
    run, folder = tmp_path / "run", slow(tmp_path / "s", "train_ddp.py", 0.3)
    workers = [*frequent, "loader.num_workers=1"]
    with Torchrun(folder, run, "train_ddp.py", TWO_RANKS, *workers) as torchrun:
        wait_for_step(run, 3)
        torchrun.kill_agent()
        torchrun.all_gone()
    assert "stopped by a signal: saved at step" in torchrun.text()
    train("train_ddp.py", run, *frequent)
    assert_same_state(run, whole)


def test_without_restarts_a_killed_rank_ends_the_run_within_seconds(frequent, tmp_path) -> None:
    run, folder = tmp_path / "run", slow(tmp_path / "s", "train_ddp.py", 0.3)
    with Torchrun(folder, run, "train_ddp.py", TWO_RANKS, *frequent) as torchrun:
        wait_for_step(run, 3)
        torchrun.rank(1).kill()
        assert torchrun.wait() != 0
        torchrun.all_gone()
    assert "[rank 0] stops, because another rank has:" in torchrun.text()
    assert "rank      : 1 (local_rank: 1)" in torchrun.text()  # torchrun's summary
    assert f"exitcode  : -{signal.SIGKILL:d}" in torchrun.text()
    assert steps_saved(run)


def test_an_agent_killed_while_its_ranks_start_leaves_none_of_them(options, tmp_path) -> None:
    """A Python that really starts looks after its launcher once torch is imported."""
    job = REPOSITORY, tmp_path / "run", "train_ddp.py", TWO_RANKS
    with Torchrun(*job, *options, is_forked=False) as torchrun:
        torchrun.rank(1)
        torchrun.kill_agent()
        torchrun.all_gone()
    assert not (tmp_path / "run" / "summary.json").exists()
