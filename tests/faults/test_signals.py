"""Signals to a run."""

import os
import signal

from runtime.preemption import REQUEUE_MARKER
from tests.faults import NUM_STEPS, assert_same_state, hit, script_with, steps_saved
from tests.helpers import checkpoint_of, needs_torchrun, run_to_end, summary_of, train


def test_a_signal_saves_and_the_resumed_run_has_the_same_bits(options, finished, tmp_path) -> None:
    """One in step 3, 7 and the last, validated later. Its other processes get all of them in step
    5, after which they load another batch."""
    run, options = tmp_path / "run", [*options, "resume=auto"]
    signals = {3: signal.SIGTERM, 7: signal.SIGUSR1, NUM_STEPS: signal.SIGINT}
    more = {step: list[str]() for step in signals}
    more[7] = ["loader.num_workers=1", "loader.prefetch_factor=1"]
    lines = list[str]()
    for step, number in signals.items():
        lines += hit(step, 0, f"os.kill(os.getpid(), {number:d})")
    kills = "; ".join(f"kill -{number:d} {{pids}}" for number in signals.values())
    pids = "pids = ' '.join(str(p.pid) for p in psutil.Process().children(recursive=True))"
    lines += hit(5, 0, f"import psutil; {pids}; os.system(f'{kills}')")

    folder = script_with(tmp_path / "s", "train.py", *lines)
    for step in signals:
        codes, [text] = run_to_end("train.py", run, *options, *more[step], folder=folder)
        assert codes == [os.EX_TEMPFAIL], text
        saved = min(step + needs_torchrun("train.py"), NUM_STEPS)  # ranks agree a step later
        assert checkpoint_of(run)["step"] == saved
        assert f"by a signal: saved at step {saved}; continue with output_dir={run}" in text
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
