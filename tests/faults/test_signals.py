"""Signals to a run."""

import os
import signal
from pathlib import Path

import pytest

from runtime.preemption import REQUEUE_MARKER
from tests.faults import NUM_STEPS, hit, script_with
from tests.helpers import folder_with, replace
from tests.processes import fork, run_to_end, train, wait_for
from tests.results import assert_same_state, checkpoint_of, steps_saved, summary_of

BEGIN = "    run_main(main)\n"


def started_with(folder: Path, hang_up: str) -> Path:
    """The script in a folder, started with this disposition of SIGHUP."""
    line = f"    import signal; signal.signal(signal.SIGHUP, signal.{hang_up})\n"
    replace(folder / "train.py", BEGIN, line + BEGIN)
    return folder


def test_a_signal_saves_and_the_resumed_run_has_the_same_bits(options, finished, tmp_path) -> None:
    """One in step 3, 7, 11 and the last, validated later. Its other processes get all of them in
    step 5, after which they load another batch."""
    run, options = tmp_path / "run", [*options, "resume=auto"]
    signals = {3: signal.SIGTERM, 7: signal.SIGUSR1, 11: signal.SIGHUP, NUM_STEPS: signal.SIGINT}
    more = {step: list[str]() for step in signals}
    more[7] = ["loader.num_workers=1", "loader.prefetch_factor=1"]
    lines = list[str]()
    for step, number in signals.items():
        lines += hit(step, 0, f"os.kill(os.getpid(), {number:d})")
    kills = "; ".join(f"kill -{number:d} {{pids}}" for number in signals.values())
    pids = "pids = ' '.join(str(p.pid) for p in psutil.Process().children(recursive=True))"
    lines += hit(5, 0, f"import psutil; {pids}; os.system(f'{kills}')")

    folder = started_with(script_with(tmp_path / "s", "train.py", *lines), "SIG_DFL")
    for step in signals:
        again = [*options, *more[step]]
        text = train("train.py", run, *again, folder=folder, code=os.EX_TEMPFAIL)
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


def test_a_closed_terminal_is_ignored_under_nohup(options, tmp_path) -> None:
    hang_up = f"if step == 3: os.kill(os.getpid(), {signal.SIGHUP:d})"
    folder = started_with(script_with(tmp_path / "s", "train.py", hang_up), "SIG_IGN")
    train("train.py", tmp_path / "run", *options, folder=folder)
    assert not (tmp_path / "run" / REQUEUE_MARKER).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_asks_for_another_start(number, options, tmp_path) -> None:
    """While Hydra has not named the folder yet, while data is indexed, and in the first step, which
    is killed."""
    run, kill = tmp_path / "run", f"import os, time; os.kill(os.getpid(), {number:d})"
    index = folder_with(
        tmp_path / "i", "train.py", ("    # data\n", f"    {kill}; time.sleep(1000)\n")
    )
    command_line = folder_with(tmp_path / "c", "train.py")
    first_step = script_with(tmp_path / "step", "train.py", f"{kill}; time.sleep(1000)")
    for folder in (command_line, index, first_step):
        started_with(folder, "SIG_DFL")
    called = f"    def begin():\n        {kill}\n        main()\n\n    run_main(begin)\n"
    replace(command_line / "train.py", BEGIN, called)
    for folder in (command_line, index):
        again = [*options, "resume=auto"]
        text = train("train.py", run, *again, folder=folder, code=os.EX_TEMPFAIL)
        assert f"output_dir={run} resume=auto" in text
        (run / REQUEUE_MARKER).unlink()
    [process], _ = fork("train.py", run, *options, "resume=auto", folder=first_step)
    wait_for((run / REQUEUE_MARKER).exists, "the request for another start")
    process.kill()
    process.join()
    train("train.py", run, *options, "resume=auto", "max_steps=1")
    assert not (run / REQUEUE_MARKER).exists()


def test_ctrl_c_before_the_first_step_interrupts(options, tmp_path) -> None:
    kill = f"import os, time; os.kill(os.getpid(), {signal.SIGINT:d}); time.sleep(1000)"
    folder = folder_with(tmp_path / "s", "train.py", ("    # data\n", f"    {kill}\n"))
    [code], [text] = run_to_end("train.py", tmp_path / "run", *options, folder=folder)
    assert code not in (None, 0, os.EX_TEMPFAIL)
    assert "KeyboardInterrupt" in text
