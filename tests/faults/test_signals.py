"""Signals that ask a run to leave."""

import signal

from runtime.preemption import EXIT_CODE, REQUEUE_MARKER
from tests.faults import assert_same_state, hit, run_to_end, script_with, steps_saved
from tests.helpers import checkpoint_of, train


def test_each_signal_saves_the_last_step_and_the_resumed_run_has_the_same_bits(
    options, tmp_path
) -> None:
    """One signal in each of the steps 3, 6 and 9."""
    whole, run, options = tmp_path / "whole", tmp_path / "run", [*options, "resume=auto"]
    signals = {3: signal.SIGTERM, 6: signal.SIGUSR1, 9: signal.SIGINT}
    lines = [
        line
        for step, number in signals.items()
        for line in hit(tmp_path / f"hit{step}", step, 0, f"os.kill(os.getpid(), {number:d})")
    ]
    folder = script_with(tmp_path / "s", "train.py", *lines)
    for step in signals:
        codes, [text] = run_to_end("train.py", run, *options, folder=folder)
        assert codes == [EXIT_CODE], text
        assert checkpoint_of(run)["step"] == step
        line = f"stopped by a signal: saved at step {step}; continue with output_dir={run}"
        assert line in text
        assert (run / REQUEUE_MARKER).exists()
        assert not (run / "summary.json").exists()
    train("train.py", run, *options)
    train("train.py", whole, *options)
    assert_same_state(run, whole)
    assert not (run / REQUEUE_MARKER).exists()


def test_a_second_ctrl_c_stops_at_once(options, tmp_path) -> None:
    """The first one waits for the end of the step."""
    interrupt = f"    os.kill(os.getpid(), {signal.SIGINT:d})"
    lines = ["if step == 3:", interrupt, "    print('goes on', flush=True)", interrupt]
    folder = script_with(tmp_path / "s", "train.py", *lines, "    time.sleep(1000)")
    run, options = tmp_path / "run", [*options, "checkpoint.every_steps=1"]
    [code], [text] = run_to_end("train.py", run, *options, folder=folder)
    assert code not in (None, 0, EXIT_CODE)
    assert "goes on" in text
    assert "KeyboardInterrupt" in text
    assert steps_saved(run)[-1] == 2
