"""With `epoch_steps`, epochs are parts of passes or many of them, and a run trains as without."""

from pathlib import Path

import pytest

from tests.helpers import has_ranks
from tests.processes import train
from tests.results import (
    assert_same_state,
    checkpoint_of,
    scalars_of,
    summary_of,
    weights_differ_by,
)
from tests.rows import rows


def steps_validated(run: Path) -> list[int]:
    return [step for step, _ in scalars_of(run, "val/loss")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("train.py", []),
        *rows(
            ("train_accumulate.py", ["accumulate_steps=2"]),
            ("train.py", ["loader=dali"]),
            ("train_ddp_ema.py", ["ema.decay=0.5"]),
        ),
    ],
)
def test_runs_cut_into_other_epochs_have_the_same_weights(script, more, options, tmp_path) -> None:
    """Epochs of one step, of 7 and of a pass; also stopped and resumed, in mid-epoch and across
    passes. On one rank, a worker process loads epochs of 7 steps."""
    options = [*options, *more, "optimizer.schedule=constant", "optimizer.warmup_epochs=0"]
    worker = [] if has_ranks(script) or "loader=dali" in more else ["loader.num_workers=1"]
    cuts = {
        "pass": ["epochs=2", "max_steps=14"],
        "1": ["epoch_steps=1", "epochs=14"],
        "7": ["epoch_steps=7", "epochs=2"],
    }
    for name, cut in cuts.items():
        train(script, tmp_path / name, *options, *cut, *(worker if name == "7" else []))
    for last in (5, 9, 14):
        resumed = [*options, *cuts["7"], "resume=auto", f"max_steps={last}"]
        train(script, tmp_path / "resumed", *resumed, *(worker if last == 9 else []))
    for name in (*cuts, "resumed"):
        assert weights_differ_by(tmp_path / name, tmp_path / "pass") == 0
    assert steps_validated(tmp_path / "7") == [7, 14]
    assert steps_validated(tmp_path / "1") == [*range(1, 15)]


def test_a_validation_that_was_not_reached_is_made_up_for_and_the_best_is_chosen_within_an_epoch(
    options, tmp_path
) -> None:
    """The run fails after the checkpoint of step 3 and before its validation, which is the best."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    fails = "        if run.step_number == 3 and cfg.checkpoint.every_steps:\n"
    fails += "            run.writer.wait()\n            raise SystemExit(0)\n"
    sum_of_losses = "        totals[1] = abs(run.step_number - 3) + 1\n"
    edits = [
        ("    model = build_model(", "    task.best_metric, task.best_mode = 'loss', 'min'\n"),
        ("        # validation\n", fails),
        ("        run.epoch(task", sum_of_losses),
    ]
    common = [*options, "epoch_steps=3", "epochs=6", "resume=auto", "max_steps=11"]
    stopping = [*common, "early_stopping.patience=1"]
    train("train.py", run, *stopping, "checkpoint.every_steps=3", edits=edits)
    stopped = train("train.py", run, *stopping, edits=edits)
    ended = train("train.py", run, *stopping, "profile.steps=[0,5]", edits=edits)
    assert "early stopping: no better val/loss in 1 validation\n" in stopped
    assert "nothing to do: the run has ended after epoch 2 (step 6)" in ended
    for output in (run, whole):
        train("train.py", output, *common, edits=edits)
    assert steps_validated(run) == steps_validated(whole) == [3, 6, 9, 11]
    for output in (run, whole):
        best, last = checkpoint_of(output, best=True), checkpoint_of(output)
        assert (best["step"], last["step"]) == (3, 11)
        assert (best["progress"]["num_epochs"], last["progress"]["num_epochs"]) == (1, 3)
        assert best["progress"]["metrics"] == last["progress"]["best_metrics"]
        assert summary_of(output)["best_mode"] == "min"
        by_class = summary_of(output)["best_by_class"].values()
        hits = sum(row["support"] * row["recall"] for row in by_class)
        top1 = hits / sum(row["support"] for row in by_class)
        assert top1 == pytest.approx(best["progress"]["metrics"]["val/top1"])
    assert_same_state(run, whole)
