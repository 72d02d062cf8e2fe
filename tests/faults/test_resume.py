"""A run that is stopped at a step, or by a signal, ends with the bits of one that is not."""

import os
import signal

import pytest

from runtime.preemption import REQUEUE_MARKER
from tests.faults import NUM_STEPS, hit
from tests.helpers import has_ranks
from tests.processes import fork, run_to_end, train, wait_for
from tests.results import assert_same_state, checkpoint_of, scalars_of, steps_saved, summary_of
from tests.rows import rows

# The scale overflows at first: those steps are skipped.
FLOAT16 = ["amp.dtype=float16", "amp.init_scale=1e8"]


@pytest.mark.parametrize(
    ("script", "overrides", "num_workers"),
    [
        ("train.py", [], 1),
        ("train.py", ["optimizer.name=muon", "optimizer.layer_decay=0.8"], 0),
        *rows(
            ("train_ddp.py", [], 0),
            ("train_fsdp.py", [], 0),
            ("train_amp.py", FLOAT16, 0),
            ("train_ddp_amp.py", ["loader=dali", *FLOAT16], 0),
            ("train_accumulate_ema.py", ["accumulate_steps=4", "ema.decay=0.5"], 1),
        ),
    ],
)
def test_a_run_stopped_twice_in_mid_epoch_ends_with_the_same_bits(
    script: str, overrides: list[str], num_workers: int, options, tmp_path
) -> None:
    """By a signal in a step that the loop leaves out, where a checkpoint is due, and after 13 steps
    with worker processes. Each rank drops other pixels."""
    whole, stopped = tmp_path / "whole", tmp_path / "run"
    loop = ["inputs = torch.nn.functional.dropout(inputs, 0.1)", "if step in (5, 10): continue"]
    options = [*options, *overrides, "checkpoint.every_steps=5", "checkpoint.keep=9"]
    train(script, whole, *options, loop=loop)
    loop = [*hit(5, 0, "os.kill(os.getpid(), 15)"), *loop]
    steps = [6 + has_ranks(script), 13]  # at the next step that ends; of two ranks one later
    texts = []
    for code, more in [
        (75, []),
        (0, [f"loader.num_workers={num_workers}", "max_steps=13"]),
        (0, []),
    ]:
        again = [*options, *more, "resume=auto"]
        texts.append(train(script, stopped, *again, loop=loop, code=code))
    assert "resume=auto: no checkpoint" in texts[0]
    for text, step in zip(texts[1:], steps, strict=True):
        assert f"step {step}" in next(x for x in text.splitlines() if "resumed from" in x)
        assert "settings that have changed" not in text
    assert_same_state(stopped, whole)
    assert steps_saved(whole) == [6, 8, 11, 15, 16]
    drawn = {rng["cpu"].numpy().tobytes() for rng in checkpoint_of(whole)["rng"]}
    assert len(drawn) == 1 + has_ranks(script)
    losses = scalars_of(whole, "train/loss")
    assert [step for step, _ in losses] == [n for n in range(1, NUM_STEPS + 1) if n not in (5, 10)]
    assert scalars_of(stopped, "train/loss") == losses
    if "amp.dtype=float16" in overrides:
        assert checkpoint_of(stopped)["scaler"]["scale"] < 1e8  # it did overflow
    assert scalars_of(stopped, "val/loss")[-1] == scalars_of(whole, "val/loss")[-1]
    assert (stopped / "train.log").read_text().count("resumed from") == 2  # of all attempts


def hang_up_is(disposition: str) -> tuple[str, str]:
    """The disposition of SIGHUP that a script is started with."""
    line = f"    import signal; signal.signal(signal.SIGHUP, signal.{disposition})\n"
    return "    run_main(main)\n", line


AT_THE_END = """
    import os
    close = run.report.close

    def close_signalled(progress):
        os.kill(os.getpid(), 10)
        close(progress)

    run.report.close = close_signalled
"""
"""SIGUSR1, while the last files are written."""


def test_a_signal_saves_and_the_resumed_run_has_the_same_bits(options, finished, tmp_path) -> None:
    """One in step 3, 7, in the validation of step 8 and in the last step, validated later. Its
    other processes get all of them in step 5, after which they load another batch."""
    run, options = tmp_path / "run", [*options, "resume=auto"]
    signals = {3: signal.SIGTERM, 7: signal.SIGUSR1, 8: signal.SIGHUP, NUM_STEPS: signal.SIGINT}
    loop = list[str]()
    for step, number in signals.items():
        if step != 8:
            loop += hit(step, 0, f"os.kill(os.getpid(), {number:d})")
    kills = "; ".join(f"kill -{number:d} {{pids}}" for number in signals.values())
    pids = "pids = ' '.join(str(p.pid) for p in psutil.Process().children(recursive=True))"
    loop += hit(5, 0, f"import psutil; {pids}; os.system(f'{kills}')")
    in_validation = f"        if epoch == 0: os.kill(os.getpid(), {signal.SIGHUP:d})\n"
    edits = [hang_up_is("SIG_DFL"), ("        # validation\n", in_validation)]
    for step in signals:
        with_worker = ["loader.num_workers=1", "loader.prefetch_factor=1"] if step == 7 else []
        again = [*options, *with_worker]
        text = train("train.py", run, *again, loop=loop, edits=edits, code=os.EX_TEMPFAIL)
        assert checkpoint_of(run)["step"] == step
        assert f"by a signal: saved at step {step}; continue with output_dir={run}" in text
        assert (run / REQUEUE_MARKER).exists()
        assert not (run / "summary.json").exists()
    edits = [("    run.finish()\n", AT_THE_END)]
    train("train.py", run, *options, edits=edits)
    assert_same_state(run, finished)
    assert summary_of(run)["val/loss"] == summary_of(finished)["val/loss"]
    assert not (run / REQUEUE_MARKER).exists()


INTERRUPT = f"import os, time; os.kill(os.getpid(), {signal.SIGINT:d}); "
UNDER_NOHUP = f"if step == 2: import os; os.kill(os.getpid(), {signal.SIGHUP:d})"
TWICE = f"if step == 3: {INTERRUPT}print('goes on', flush=True); {INTERRUPT}time.sleep(1000)"


@pytest.mark.parametrize(
    ("loop", "edits", "saved"),
    [
        ([UNDER_NOHUP, TWICE], [hang_up_is("SIG_IGN")], [1, 2]),
        ([], [("    # data\n", f"    {INTERRUPT}time.sleep(1000)\n")], []),
    ],
)
def test_a_second_ctrl_c_or_one_before_the_first_step_stops_at_once(
    loop, edits, saved, options, tmp_path
) -> None:
    """The first one waits for the end of the step. A closed terminal is ignored under nohup."""
    run, options = tmp_path / "run", [*options, "checkpoint.every_steps=1"]
    [code], [text] = run_to_end("train.py", run, *options, loop=loop, edits=edits)
    assert code not in (None, 0, os.EX_TEMPFAIL)
    assert "KeyboardInterrupt" in text
    assert ("goes on" in text) == bool(saved)
    assert steps_saved(run) == saved


KILL = f"import os, time; os.kill(os.getpid(), {signal.SIGTERM:d})"
HANG_UP = f"import os, time; os.kill(os.getpid(), {signal.SIGHUP:d})"
EARLY = f"""
    hydra_main = main

    def main():
        {KILL}
        hydra_main()

"""


def test_a_signal_before_the_first_step_asks_for_another_start(options, tmp_path) -> None:
    """While Hydra has not named the folder yet, while data is indexed, and in the first step, which
    is killed."""
    options = [*options, "resume=auto"]
    places = {
        "early": ("    run_main(main)\n", EARLY),
        "index": ("    # data\n", f"    {HANG_UP}; time.sleep(1000)\n"),
    }
    for name, place in places.items():
        run, edits = tmp_path / name, [hang_up_is("SIG_DFL"), place]
        text = train("train.py", run, *options, edits=edits, code=os.EX_TEMPFAIL)
        assert f"output_dir={run} resume=auto" in text
        assert not steps_saved(run)
        assert (run / REQUEUE_MARKER).exists()
    run = tmp_path / "step"
    [process], _ = fork("train.py", run, *options, loop=[f"{KILL}; time.sleep(1000)"])
    wait_for((run / REQUEUE_MARKER).exists, "the request for another start")
    process.kill()
    process.join()
    train("train.py", run, *options, "max_steps=1")
    assert not (run / REQUEUE_MARKER).exists()
