"""Ranks that raise, hang, are killed or signalled, and torchrun; other numbers of ranks."""

import signal
import time

import psutil
import pytest

from runtime.preemption import REQUEUE_MARKER
from tests.faults import NUM_STEPS, hit
from tests.helpers import REPOSITORY, folder_with
from tests.processes import fork, join, run_to_end, train, wait_for
from tests.results import assert_same_state, checkpoint_of, scalars_of, steps_saved, summary_of
from tests.torchrun import TWO_RANKS, Torchrun

SCRIPT = "train_ddp.py"
RESTARTED = [*TWO_RANKS, "--max-restarts=3"]


def test_killed_and_signalled_processes_end_together_and_go_on(options, tmp_path) -> None:
    """A worker is killed in step 2, a rank in step 6, torchrun or the rank itself in others."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    lines = ["import signal"]
    kill_a_worker = "import psutil, tests.processes as p; p.workers_of(psutil.Process())[0].kill()"
    lines += hit(2, 1, kill_a_worker)
    for step, rank, process_and_signal in [
        (4, 1, "os.getppid(), signal.SIGKILL"),
        (6, 0, "os.getpid(), signal.SIGKILL"),
        (8, 1, "os.getppid(), signal.SIGTERM"),
        (10, 1, "os.getpid(), signal.SIGTERM"),
        (12, 1, "os.getpid(), signal.SIGKILL"),
    ]:
        lines += hit(step, rank, f"os.kill({process_and_signal})")
        lines += ["    while not run._is_signalled(): time.sleep(0.01)"]
    folder = folder_with(tmp_path / "s", SCRIPT, loop=lines)
    frequent = [*options, "checkpoint.every_steps=1", "resume=auto"]

    def run_until(step: int, *command: str) -> str:
        """Run until this step or the next is saved, and no process is left."""
        arguments = [*command, f"output_dir={run}", *frequent]
        with Torchrun(arguments, folder, tmp_path / str(step)) as torchrun:
            assert torchrun.wait() != 0, torchrun.text()
        assert steps_saved(run)[-1] in (step, step + 1), torchrun.text()
        return torchrun.text()

    # Without further batches in advance, which would hide for some steps that the worker is dead.
    with_workers = [SCRIPT, "loader.num_workers=1", "loader.prefetch_factor=1"]
    texts = [run_until(4, *RESTARTED, *with_workers), run_until(8, *RESTARTED, SCRIPT)]
    texts += [run_until(10, *TWO_RANKS, SCRIPT)]
    assert [text.count("resumed from") for text in texts] == [1, 2, 1]
    assert [text.count("stopped by a signal: saved at step") for text in texts] == [1, 1, 1]
    assert (run / REQUEUE_MARKER).exists()
    text = run_until(11, *TWO_RANKS, *with_workers)
    assert steps_saved(run)[-1] == 11
    assert "[rank 0] stops, because another rank has:" in text

    train(SCRIPT, run, *frequent)
    train(SCRIPT, whole, *options)
    assert_same_state(run, whole)
    assert scalars_of(run, "train/loss") == scalars_of(whole, "train/loss")
    assert summary_of(run)["steps"] == NUM_STEPS
    assert not (run / REQUEUE_MARKER).exists()


def test_ranks_that_wait_for_one_that_indexes_ask_for_another_start(options, tmp_path) -> None:
    """torchrun is signalled, as by Slurm; without a step there is no checkpoint."""
    run, ready = tmp_path / "run", tmp_path / "ready"
    index = "    import os, time\n    if group.rank == 0: time.sleep(1000)\n"
    waits = f"    open({str(ready)!r}, 'w').write(str(os.getpid()))\n"
    edits = ("    # data\n", index), ("    run = Run(", waits)
    folder = folder_with(tmp_path / "s", SCRIPT, *edits)
    command = [*TWO_RANKS, "--signals-to-handle=SIGTERM,SIGUSR1", SCRIPT, f"output_dir={run}"]
    with Torchrun([*command, *options], folder, tmp_path / "prints") as torchrun:
        wait_for(lambda: ready.exists() and ready.read_text(), "the rank that waits")
        time.sleep(1)
        psutil.Process(torchrun.agent.pid).send_signal(signal.SIGUSR1)
        assert torchrun.wait() != 0
        assert (run / REQUEUE_MARKER).exists(), torchrun.text()
    assert not steps_saved(run)


def test_a_run_goes_on_in_mid_epoch_with_other_batches_on_more_ranks(options, tmp_path) -> None:
    """27 of the epoch's 64 rows are used; two batches of 14 are left of it."""
    run = tmp_path / "run"
    train("train.py", run, *options, "global_batch_size=9", "max_steps=3")
    text = train("train_ddp.py", run, *options, "global_batch_size=14", "resume=auto")
    assert "settings that have changed: global_batch_size: 9 then, 14 now" in text
    saved, steps_per_epoch = checkpoint_of(run), 64 // 14
    assert saved["step"] == saved["scheduler"]["last_epoch"] == 2 * steps_per_epoch
    assert [step for step, _ in scalars_of(run, "train/loss")] == [1, 2, *range(3, 9)]
    assert [step for step, _ in scalars_of(run, "val/loss")] == [4, 8]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [("data.hflop=1", "did you mean data.hflip?"), ("hydra.mode=MULTIRUN seed=1,2", "multirun")],
)
def test_under_torchrun_a_mistake_is_told(overrides: str, message: str, tmp_path) -> None:
    """In torchrun's summary, also if it has ended rank 0."""
    run = tmp_path / "run"
    command = [*TWO_RANKS, SCRIPT, *overrides.split(), f"output_dir={run}"]
    with Torchrun(command, REPOSITORY, tmp_path / "prints") as torchrun:
        assert torchrun.wait() == 1
    summary = torchrun.text().partition("Root Cause")[2]
    assert message in summary
    assert "exitcode  : 2" in summary
    assert not (run / REQUEUE_MARKER).exists()  # another start would not help


def test_a_rank_that_raises_shows_its_traceback_and_all_end(options, tmp_path) -> None:
    loop = ["assert step < 3 or rank == 0, 'ouch'"]
    codes, prints = run_to_end(SCRIPT, tmp_path / "run", *options, loop=loop)
    assert codes == [1, 1]
    assert prints[1].count("[rank 1] Traceback") == 1
    assert prints[1].count("[rank 1] AssertionError: ouch") == 1
    assert "Traceback" not in prints[0]
    assert prints[0].count("[rank 0] stops, because another rank has:") == 1


def test_ranks_that_wait_for_one_that_hangs_end_after_the_timeout(options, tmp_path) -> None:
    loop = ["if (step, rank) == (3, 1): time.sleep(1000)"]
    overrides = [*options, "global_batch_size=9", "distributed.timeout_s=10"]
    processes, prints = fork(SCRIPT, tmp_path / "run", *overrides, loop=loop, num_ranks=3)
    codes = join([processes[0], processes[2]])
    assert processes[1].is_alive()
    processes[1].kill()  # as torchrun does
    assert codes == [1, 1]
    texts = [prints[rank].read_text() for rank in (0, 2)]
    assert all("stops, because another rank has: " in text for text in texts)
    assert "10000ms" in "".join(texts)
