"""With `epoch_steps`, epochs are parts of passes or many of them, and a run trains as without."""

from pathlib import Path

import pytest
import torch

from tests.faults import assert_same_state
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
from tests.rows import rows


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """A run whose passes have eight steps, with random crops."""
    photos = digit_folders(tmp_path_factory.mktemp("photos"), range(2), 32, 8)
    crops = ["data.crop=[24,24]", "data.random_crop=true", "data.hflip=0.5"]
    small = ["model.kwargs.width=8", "global_batch_size=8", "log.images=0"]
    small += ["optimizer.warmup_epochs=0"]
    return photos_in(photos, *crops, *small, "log.every_steps=1")


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint_of(run)["model"]


def steps_validated(run: Path) -> list[int]:
    return [step for step, _ in scalars_of(run, "val/loss")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "more"),
    [
        ("train.py", ["loader.num_workers=1"]),
        *rows(
            ("train_accumulate.py", ["accumulate_steps=2", "loader.num_workers=1"]),
            ("train.py", ["loader=dali"]),
            ("train_ddp_ema.py", ["ema.decay=0.5"]),
        ),
    ],
)
def test_runs_cut_into_other_epochs_have_the_same_weights(script, more, options, tmp_path) -> None:
    """Epochs of one step, of 7 and of a pass; also stopped and resumed, in mid-epoch and across
    passes."""
    num_ranks = 2 if has_ranks(script) else 1
    folder = folder_with(tmp_path / "s", script)
    common, steps = [script, *options, *more], 14
    cuts = {"pass": ["epochs=2"], "1": ["epoch_steps=1", "epochs=14"], "7": ["epoch_steps=7"]}
    cuts["pass"] += [f"max_steps={steps}", "optimizer.schedule=constant"]
    cuts["1"] += ["optimizer.schedule=constant"]
    cuts["7"] += ["epochs=2", "optimizer.schedule=constant"]
    commands = [[*common, *cut, f"output_dir={tmp_path / name}"] for name, cut in cuts.items()]
    for last in (5, 9, steps):
        resumed = [f"output_dir={tmp_path / 'resumed'}", "resume=auto", f"max_steps={last}"]
        commands.append([*common, *cuts["7"], *resumed])
    run_all(commands, tmp_path, num_ranks, folder=folder)
    weights = [weights_of(tmp_path / name) for name in (*cuts, "resumed")]
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])
    assert steps_validated(tmp_path / "7") == [7, 14]
    assert steps_validated(tmp_path / "1") == [*range(1, 15)]


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
    common = ["train.py", *options, "epoch_steps=3", "epochs=6", "resume=auto", "max_steps=11"]
    failing = [*common, f"output_dir={run}", "early_stopping.patience=1"]
    commands = [[*failing, "checkpoint.every_steps=3"], failing, failing]
    commands += [[*common, f"output_dir={output}"] for output in (run, whole)]
    printed = run_all(commands, tmp_path, folder=folder)
    assert "early stopping: no better val/loss in 1 validation\n" in printed[1]
    assert "nothing to do: the run has ended after epoch 2 (step 6)" in printed[2]
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
