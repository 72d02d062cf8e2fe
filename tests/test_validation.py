"""With `validation.every_steps`, runs are validated within epochs, and train as without it."""

from pathlib import Path

import pytest

from tests.faults import NUM_STEPS, assert_same_state
from tests.helpers import (
    checkpoint_of,
    folder_with,
    has_ranks,
    replace,
    run_all,
    scalars_of,
    summary_of,
)
from tests.images import digit_folders, photos_in
from tests.parts import rows_of

EVERY_3 = [3, 6, 8, 9, 12, 15, 16]
"""Steps of two epochs of eight; the last of an epoch is validated once."""


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """A run of two epochs of eight steps, with random crops."""
    photos = digit_folders(tmp_path_factory.mktemp("photos"), range(2), 32, 8)
    crops = ["data.crop=[24,24]", "data.random_crop=true", "data.hflip=0.5"]
    small = ["model.kwargs.width=8", "global_batch_size=8", "epochs=2", "log.images=0"]
    return photos_in(photos, *crops, *small, "log.every_steps=1")


def steps_validated(run: Path) -> list[int]:
    return [step for step, _ in scalars_of(run, "val/loss")]


@pytest.mark.parametrize(
    ("script", "more"),
    [("train.py", ["loader.num_workers=1"]), *rows_of("VALIDATED_WITHIN_EPOCHS")],
)
def test_a_run_validated_within_epochs_trains_as_without_and_goes_on_from_each_place(
    script: str, more: list[str], options, tmp_path
) -> None:
    """Stopped between two validations, and at one of them."""
    num_ranks = 2 if has_ranks(script) else 1
    folder = folder_with(tmp_path / "s", script)
    once, often, stopped = (tmp_path / name for name in ("once", "often", "stopped"))
    common = [script, *options, *more]
    every = [*common, "validation.every_steps=3"]
    commands = [[*common, f"output_dir={once}"], [*every, f"output_dir={often}"]]
    for last in (5, 6, NUM_STEPS):
        resumed = [f"output_dir={stopped}", "resume=auto", f"max_steps={last}"]
        commands.append([*every, *resumed])
    printed = run_all(commands, tmp_path, num_ranks, folder=folder)
    for run in (often, stopped):
        assert_same_state(run, once)
        assert scalars_of(run, "train/loss") == scalars_of(once, "train/loss")
    assert (steps_validated(once), steps_validated(often)) == ([8, 16], EVERY_3)
    assert steps_validated(stopped) == sorted([*EVERY_3, 5])  # max_steps is validated, too
    values = dict(scalars_of(often, "val/loss"))
    assert {step: values[step] for step in (8, 16)} == dict(scalars_of(once, "val/loss"))
    best = summary_of(often)["best"]["val/loss"]
    assert best == pytest.approx(values[checkpoint_of(often, "best.pt")["step"]])
    assert "epoch 1 of 2, step 3 of 8: " in printed[1]
    assert printed[1].count("epoch 1 of 2") == 3


def test_a_validation_that_was_not_reached_is_made_up_for_and_the_best_is_chosen_within_an_epoch(
    options, tmp_path
) -> None:
    """The run fails after the checkpoint of step 3 and before its validation, which is the best."""
    folder, run, whole = (tmp_path / name for name in ("s", "run", "whole"))
    folder_with(folder, "train.py")
    fails = (
        "        # validation\n        if run.step_number == 3 and cfg.checkpoint.every_steps:\n"
    )
    fails += "            run.writer.wait()\n            raise SystemExit(0)\n"
    replace(folder / "train.py", "        # validation\n", fails)
    record = "        run.epoch(task"
    told = "        totals[1] = abs(run.step_number - 3) + 1  # the sum of losses\n"
    task = "    task = build_task(cfg, train_loader)\n"
    replace(folder / "train.py", record, told + record)
    replace(
        folder / "train.py", task, f"{task}    task.best_metric, task.best_mode = 'loss', 'min'\n"
    )
    common = ["train.py", *options, "validation.every_steps=3", "resume=auto", "max_steps=11"]
    failing = [*common, f"output_dir={run}", "early_stopping.patience=1"]
    commands = [[*failing, "checkpoint.every_steps=3"], failing, failing]
    commands += [[*common, f"output_dir={output}"] for output in (run, whole)]
    printed = run_all(commands, tmp_path, folder=folder)
    assert "early stopping: no better val/loss in 1 validation\n" in printed[1]
    assert "nothing to do: the run has ended after epoch 0 (step 6)" in printed[2]
    assert "raise epochs=2 max_steps=11 early_stopping.patience=1" in printed[2]
    assert steps_validated(run) == steps_validated(whole) == [3, 6, 8, 9, 11]
    for output in (run, whole):
        best, last = checkpoint_of(output, "best.pt"), checkpoint_of(output)
        assert (best["step"], last["step"]) == (3, 11)
        assert (best["run"]["num_epochs"], last["run"]["num_epochs"]) == (0, 1)
        assert best["run"]["metrics"] == last["run"]["best_metrics"]
        assert summary_of(output)["best_mode"] == "min"
        by_class = summary_of(output)["best_by_class"].values()
        hits = sum(row["support"] * row["recall"] for row in by_class)
        top1 = hits / sum(row["support"] for row in by_class)
        assert top1 == pytest.approx(best["run"]["metrics"]["val/top1"])
    assert_same_state(run, whole)
