"""Signals to a run, to torchrun and its ranks; SIGKILL, which nobody can catch."""

import os
import signal

from runtime.preemption import REQUEUE_MARKER
from tests.faults import NUM_STEPS, assert_same_state, hit, script_with, steps_saved
from tests.helpers import checkpoint_of, run_to_end, scalars_of, summary_of, train
from tests.torchrun import TWO_RANKS, Torchrun

SCRIPT = "train_ddp.py"
RESTARTED = [*TWO_RANKS, "--max-restarts=3"]
WORKERS = "import psutil, tests.helpers; workers = tests.helpers.workers_of(psutil.Process()); "


def test_a_signal_saves_and_the_resumed_run_has_the_same_bits(options, finished, tmp_path) -> None:
    """One in step 3, 6 and the last, validated later; workers ignore those that all get in 4."""
    run, options = tmp_path / "run", [*options, "resume=auto"]
    signals = {3: signal.SIGTERM, 6: signal.SIGUSR1, NUM_STEPS: signal.SIGINT}
    more = {step: list[str]() for step in signals}
    more[6] = ["loader.num_workers=1"]
    lines = list[str]()
    for step, number in signals.items():
        lines += hit(step, 0, f"os.kill(os.getpid(), {number:d})")
    kills = "; ".join(f"kill -{number:d} {{w.pid}}" for number in signals.values())
    send = f"{WORKERS}[w] = workers; os.system(f'{kills}')"  # a SIGTERM of its own would end it
    lines += hit(4, 0, send)

    folder = script_with(tmp_path / "s", "train.py", *lines)
    for step in signals:
        codes, [text] = run_to_end("train.py", run, *options, *more[step], folder=folder)
        assert codes == [os.EX_TEMPFAIL], text
        assert checkpoint_of(run)["step"] == step
        assert f"by a signal: saved at step {step}; continue with output_dir={run}" in text
        assert (run / REQUEUE_MARKER).exists()
        assert not (run / "summary.json").exists()
    train("train.py", run, *options)
    assert_same_state(run, finished)
    assert summary_of(run)["val/loss"] == summary_of(finished)["val/loss"]
    assert not (run / REQUEUE_MARKER).exists()


def test_a_second_ctrl_c_stops_at_once(options, tmp_path) -> None:
    """The first one waits for the end of the step."""
    interrupt = f"    os.kill(os.getpid(), {signal.SIGINT:d})"
    lines = ["if step == 3:", interrupt, "    print('goes on', flush=True)", interrupt]
    folder = script_with(tmp_path / "s", "train.py", *lines, "    time.sleep(1000)")
    run, options = tmp_path / "run", [*options, "checkpoint.every_steps=1"]
    [code], [text] = run_to_end("train.py", run, *options, folder=folder)
    assert code not in (None, 0, os.EX_TEMPFAIL)
    assert "goes on" in text
    assert "KeyboardInterrupt" in text
    assert steps_saved(run)[-1] == 2


def test_killed_and_signalled_processes_end_together_and_go_on(options, tmp_path) -> None:
    """A worker is killed in step 2, a rank in step 6, torchrun or the rank itself in others."""
    run, whole, folder = (tmp_path / name for name in ("run", "whole", "s"))
    lines = ["import signal", "from runtime import preemption"]
    lines += hit(2, 1, f"{WORKERS}workers[0].kill()")
    for step, rank, process_and_signal in [
        (4, 1, "os.getppid(), signal.SIGKILL"),
        (6, 0, "os.getpid(), signal.SIGKILL"),
        (8, 1, "os.getppid(), signal.SIGTERM"),
        (10, 1, "os.getpid(), signal.SIGTERM"),
        (12, 1, "os.getpid(), signal.SIGKILL"),
    ]:
        lines += hit(step, rank, f"os.kill({process_and_signal})")
        lines += ["    while not preemption.is_requested(): time.sleep(0.01)"]
    path = script_with(folder, SCRIPT, *lines) / SCRIPT
    # Linux sends nothing to a rank whose torchrun dies, unless asked: torch asks where it forks.
    path.write_text(f"import ctypes\n\nctypes.CDLL(None).prctl(1, 0)\n{path.read_text()}")
    frequent = [*options, "checkpoint.every_steps=1", "resume=auto"]

    def run_until(step: int, *command: str, is_forked: bool = True) -> str:
        """Run until this step or the next is saved, and no process is left."""
        arguments = [*command, f"output_dir={run}", *frequent]
        with Torchrun(arguments, folder, tmp_path / str(step), is_forked=is_forked) as torchrun:
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
    # A torchrun that forks its ranks names any of those that have ended.
    text = run_until(11, *TWO_RANKS, *with_workers, is_forked=False)
    assert steps_saved(run)[-1] == 11
    assert "[rank 0] stops, because another rank has:" in text
    assert "rank      : 1 (local_rank: 1)" in text  # torchrun's summary
    assert f"exitcode  : -{signal.SIGKILL:d}" in text

    train(SCRIPT, run, *frequent)
    train(SCRIPT, whole, *options)
    assert_same_state(run, whole)
    assert scalars_of(run, "train/loss") == scalars_of(whole, "train/loss")
    assert summary_of(run)["steps"] == NUM_STEPS
    assert not (run / REQUEUE_MARKER).exists()
