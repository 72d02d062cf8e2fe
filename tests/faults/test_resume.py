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
    """Worker processes between the first stop and the second change nothing either. Each rank drops
    other pixels."""
    whole, stopped = tmp_path / "whole", tmp_path / "run"
    dropout = ["inputs = nn.functional.dropout(inputs, 0.1)"]
    train(script, whole, *options, *overrides, loop=dropout)
    steps: dict[int, list[str]] = {3: [], 13: [f"loader.num_workers={num_workers}"], NUM_STEPS: []}
    texts = []
    for last, worker in steps.items():
        more = [*overrides, *worker, "resume=auto", f"max_steps={last}"]
        texts.append(train(script, stopped, *options, *more, loop=dropout))
    assert "resume=auto: no checkpoint" in texts[0]
    for text, step in zip(texts[1:], steps, strict=False):
        assert f"step {step}" in next(x for x in text.splitlines() if "resumed from" in x)
        assert "settings that have changed" not in text
    assert_same_state(stopped, whole)
    drawn = {rng["cpu"].numpy().tobytes() for rng in checkpoint_of(whole)["rng"]}
    assert len(drawn) == 1 + has_ranks(script)
    losses = scalars_of(whole, "train/loss")
    assert scalars_of(stopped, "train/loss") == losses
    assert len(losses) == NUM_STEPS
    if "amp.dtype=float16" in overrides:
        assert checkpoint_of(stopped)["scaler"]["scale"] < 1e8  # it did overflow
    assert scalars_of(stopped, "val/loss")[-1] == scalars_of(whole, "val/loss")[-1]
    assert (stopped / "train.log").read_text().count("resumed from") == 2  # of all attempts


@pytest.mark.parametrize("script", ["train.py", *rows("train_ddp.py")])
def test_steps_that_the_loop_leaves_out_break_no_count(script: str, options, tmp_path) -> None:
    """By `continue`, where a checkpoint is due, and where a signal comes."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    leave_out = "if step in (5, 10): continue"
    signalled = [*hit(5, 0, "os.kill(os.getpid(), 15)"), leave_out]
    common = [*options, "checkpoint.every_steps=5", "checkpoint.keep=9", "resume=auto"]
    train(script, run, *common, loop=signalled, code=75)
    text = train(script, run, *common, loop=signalled)
    train(script, whole, *common, loop=[leave_out])
    stopped = 6 + has_ranks(script)  # at the next step that ends; of two ranks one later
    assert f"step-{stopped:08d}: step {stopped}" in text
    assert_same_state(run, whole)
    assert steps_saved(whole) == [6, 8, 11, 15, 16]
    losses = scalars_of(whole, "train/loss")
    assert [step for step, _ in losses] == [n for n in range(1, 17) if n not in (5, 10)]
    assert scalars_of(run, "train/loss") == losses


def hang_up_is(disposition: str) -> tuple[str, str]:
    """The disposition of SIGHUP that a script is started with."""
    line = f"    import signal; signal.signal(signal.SIGHUP, signal.{disposition})\n"
    return "    run_main(main)\n", line


def test_a_signal_saves_and_the_resumed_run_has_the_same_bits(options, finished, tmp_path) -> None:
    """One in step 3, 7, 11 and the last, validated later. Its other processes get all of them in
    step 5, after which they load another batch."""
    run, options = tmp_path / "run", [*options, "resume=auto"]
    signals = {3: signal.SIGTERM, 7: signal.SIGUSR1, 11: signal.SIGHUP, NUM_STEPS: signal.SIGINT}
    loop = list[str]()
    for step, number in signals.items():
        loop += hit(step, 0, f"os.kill(os.getpid(), {number:d})")
    kills = "; ".join(f"kill -{number:d} {{pids}}" for number in signals.values())
    pids = "pids = ' '.join(str(p.pid) for p in psutil.Process().children(recursive=True))"
    loop += hit(5, 0, f"import psutil; {pids}; os.system(f'{kills}')")
    edits = [hang_up_is("SIG_DFL")]
    for step in signals:
        with_worker = ["loader.num_workers=1", "loader.prefetch_factor=1"] if step == 7 else []
        again = [*options, *with_worker]
        text = train("train.py", run, *again, loop=loop, edits=edits, code=os.EX_TEMPFAIL)
        assert checkpoint_of(run)["step"] == step
        assert f"by a signal: saved at step {step}; continue with output_dir={run}" in text
        assert (run / REQUEUE_MARKER).exists()
        assert not (run / "summary.json").exists()
    train("train.py", run, *options)
    assert_same_state(run, finished)
    assert summary_of(run)["val/loss"] == summary_of(finished)["val/loss"]
    assert not (run / REQUEUE_MARKER).exists()


INTERRUPT = f"import os, time; os.kill(os.getpid(), {signal.SIGINT:d}); "
TWICE = f"if step == 3: {INTERRUPT}print('goes on', flush=True); {INTERRUPT}time.sleep(1000)"


@pytest.mark.parametrize(
    ("loop", "edits", "saved"),
    [
        ([TWICE], [], [1, 2]),  # the first one waits for the end of the step
        ([], [("    # data\n", f"    {INTERRUPT}time.sleep(1000)\n")], []),
    ],
)
def test_a_second_ctrl_c_or_one_before_the_first_step_stops_at_once(
    loop, edits, saved, options, tmp_path
) -> None:
    run, options = tmp_path / "run", [*options, "checkpoint.every_steps=1"]
    [code], [text] = run_to_end("train.py", run, *options, loop=loop, edits=edits)
    assert code not in (None, 0, os.EX_TEMPFAIL)
    assert "KeyboardInterrupt" in text
    assert ("goes on" in text) == bool(saved)
    assert steps_saved(run) == saved


def test_a_closed_terminal_is_ignored_under_nohup(options, tmp_path) -> None:
    loop = [f"if step == 3: os.kill(os.getpid(), {signal.SIGHUP:d})"]
    train("train.py", tmp_path / "run", *options, loop=loop, edits=[hang_up_is("SIG_IGN")])
    assert not (tmp_path / "run" / REQUEUE_MARKER).exists()


KILL = "import os, time; os.kill(os.getpid(), {:d})"
EARLY = """
    hydra_main = main

    def main():
        {kill}
        hydra_main()

"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_asks_for_another_start(number, options, tmp_path) -> None:
    """While Hydra has not named the folder yet, while data is indexed, and in the first step, which
    is killed."""
    kill, options = KILL.format(number), [*options, "resume=auto"]
    places = {
        "early": ("    run_main(main)\n", EARLY.format(kill=kill)),
        "index": ("    # data\n", f"    {kill}; time.sleep(1000)\n"),
    }
    for name, place in places.items():
        run, edits = tmp_path / name, [hang_up_is("SIG_DFL"), place]
        text = train("train.py", run, *options, edits=edits, code=os.EX_TEMPFAIL)
        assert f"output_dir={run} resume=auto" in text
        assert (run / REQUEUE_MARKER).exists()
    run = tmp_path / "step"
    loop, edits = [f"{kill}; time.sleep(1000)"], [hang_up_is("SIG_DFL")]
    [process], _ = fork("train.py", run, *options, loop=loop, edits=edits)
    wait_for((run / REQUEUE_MARKER).exists, "the request for another start")
    process.kill()
    process.join()
    train("train.py", run, *options, "max_steps=1")
    assert not (run / REQUEUE_MARKER).exists()
