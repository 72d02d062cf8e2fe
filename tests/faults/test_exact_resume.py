"""A run that was stopped and resumed ends with the same bits as one that was not."""

import pytest

from tests.faults import NUM_STEPS, hit, script_with
from tests.helpers import has_ranks
from tests.processes import train
from tests.results import assert_same_state, checkpoint_of, scalars_of, steps_saved
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
    """The uninterrupted run has no worker processes: they change nothing either. Each rank drops
    other pixels."""
    whole, stopped = tmp_path / "whole", tmp_path / "run"
    dropout = "inputs = nn.functional.dropout(inputs, 0.1)"
    folder = script_with(tmp_path / "s", script, dropout)
    train(script, whole, *options, *overrides, folder=folder)
    more = [*options, *overrides, "resume=auto", f"loader.num_workers={num_workers}"]
    steps = 3, 13, NUM_STEPS
    texts = [train(script, stopped, *more, f"max_steps={last}", folder=folder) for last in steps]
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
    left_out = [*hit(5, 0, "os.kill(os.getpid(), 15)"), "if step in (5, 10): continue"]
    folder = script_with(tmp_path / "s", script, *left_out)
    common = [*options, "checkpoint.every_steps=5", "checkpoint.keep=9", "resume=auto"]
    train(script, run, *common, folder=folder, code=75)
    text = train(script, run, *common, folder=folder)
    train(script, whole, *common, folder=folder)
    stopped = 6 + has_ranks(script)  # at the next step that ends; of two ranks one later
    assert f"step-{stopped:08d}: step {stopped}" in text
    assert_same_state(run, whole)
    assert steps_saved(whole) == [6, 8, 11, 15, 16]
    losses = scalars_of(whole, "train/loss")
    assert [step for step, _ in losses] == [n for n in range(1, 17) if n not in (5, 10)]
    assert scalars_of(run, "train/loss") == losses
