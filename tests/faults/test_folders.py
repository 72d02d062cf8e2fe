"""One run at a time in a folder, and what a run may go on from."""

import shutil
import time
from pathlib import Path

import torch

from tests.faults import NUM_STEPS
from tests.processes import ENVIRONMENT, fork, join, train, wait_for
from tests.results import checkpoint_of, scalars_of, steps_saved, summary_of, values_of

LONGER = ["resume=auto", "epochs=3"]
FRESH = ["checkpoint.fresh_epoch=true"]
INPUTS = [*LONGER, "data.mean=[0.5,0.5,0.5]"]
REFUSED = {
    "already contains a run; resume=auto continues it,": [],
    "optimizer.name: adamw then, sgd now": [*LONGER, "optimizer=sgd"],
    "optimizer.kwargs: {} then": [*LONGER, "+optimizer.kwargs.amsgrad=true"],
    "undo the changes (model.kwargs: ": [*LONGER, "model.kwargs.width=16"],
    "model.freeze: None then, backbone now": [*LONGER, "model.freeze=backbone"],
    "epoch_steps: None then, 4 now": [*LONGER, "epoch_steps=4"],
    "(data.mean: [0.485, 0.456, 0.406] then, [0.5, 0.5, 0.5] now)": INPUTS,
}
"""Options of runs that do not fit the folder of a finished one, by what their messages name."""

CHANGED = ["optimizer.lr=0.001", "optimizer.weight_decay=0.5", "global_batch_size=16"]


def texts_of(run: Path) -> dict[str, str]:
    """The names of all files, and the text of those that are no log."""
    return {
        str(path.relative_to(run)): path.read_text() if path.suffix in (".json", ".yaml") else ""
        for path in run.rglob("*")
    }


def test_a_folder_refuses_what_does_not_fit_and_lists_the_rest(finished, options, tmp_path) -> None:
    """`overwrite=true` removes the earlier run."""
    run = shutil.copytree(finished, tmp_path / "run")
    for message, more in REFUSED.items():
        text = train("train.py", run, *options, *more, code=2)
        assert "Traceback" not in text
        assert message in text.splitlines()[-1]
        assert str(run) in text.splitlines()[-1]
        assert texts_of(run) == texts_of(finished)

    text = train("train.py", run, *options, *INPUTS, *FRESH, *CHANGED)
    changed = text.partition("settings that have changed")[2]
    assert "data.mean: [0.485, 0.456, 0.406] then" in changed
    for change in ("lr: 0.003 then, 0.001 now", "weight_decay: 0.01 then, 0.5 now"):
        assert f"optimizer.{change}" in changed
    assert "global_batch_size: 8 then, 16 now" in changed
    [group] = checkpoint_of(run)["optimizer"]["param_groups"]
    assert (group["weight_decay"], group["initial_lr"]) == (0.5, 0.001)
    followed = values_of(run, "train/lr")[-4:]  # the last epoch, at 16 a step
    assert 0 < max(followed) < 0.001

    (run / "mlflow_id").write_text("of the earlier run")
    train("train.py", run, *options, "overwrite=true", "max_steps=3")
    assert_is_fresh(run)
    assert summary_of(run)["steps"] == 3
    assert not (run / "mlflow_id").exists()


def assert_is_fresh(run: Path) -> None:
    """The folder has a run of three steps, and nothing of an earlier one."""
    assert steps_saved(run) == [3]
    assert [step for step, _ in scalars_of(run, "train/loss")] == [1, 2, 3]
    assert len(list(run.glob("events.*"))) == 1


def test_a_file_of_weights_is_no_checkpoint_and_a_run_that_saved_none_starts_again(
    finished, options, tmp_path
) -> None:
    """A run that failed in its first step has no events either, and leaves its folder free."""
    files = [finished / "checkpoints" / "model.safetensors", tmp_path / "plain.pt"]
    torch.save(checkpoint_of(finished)["model"], files[1])
    for path in files:
        text = train("train.py", tmp_path / "x", *options, f"resume={path}", code=2)
        assert f"\nresume={path}: " in f"\n{text}"
        assert "checkpoints/step-*" in text.splitlines()[-1]
        assert "Traceback" not in text
    fails = ["assert step == 3 or step < cfg.max_steps"]
    for name, steps, more in (("first", 1, []), ("second", 2, ["resume=auto"])):
        run = tmp_path / name
        text = train("train.py", run, *options, f"max_steps={steps}", loop=fails, code=1)
        assert "Traceback" in text  # of a bug
        train("train.py", run, *options, "max_steps=3", *more, loop=fails)
        assert_is_fresh(run)


def test_a_folder_belongs_to_one_run_until_it_ends_for_which_one_that_torchrun_restarts_waits(
    options, tmp_path, monkeypatch
) -> None:
    run, begins = tmp_path / "run", tmp_path / "begins"
    hangs = ["if step == 3 and cfg.max_steps is None: time.sleep(1000)"]
    asks = [("    run = Run(", f"    open({str(begins)!r}, 'w').close()\n")]
    options = [*options, "checkpoint.every_steps=1", "resume=auto"]
    [process], _ = fork("train.py", run, *options, loop=hangs)
    wait_for(lambda: 2 in steps_saved(run), "step 2")
    text = train("train.py", run, *options, code=2)
    assert f"output_dir={run} belongs to a run that is still going; " in text
    monkeypatch.setitem(ENVIRONMENT, "TORCHELASTIC_MAX_RESTARTS", "3")
    [waiting], [prints] = fork("train.py", run, *options, "max_steps=6", edits=asks)
    wait_for(begins.exists, "a run that asks for the folder")
    time.sleep(1)
    process.kill()
    assert join([waiting]) == [0], prints.read_text()
    assert "step-00000002: step 2" in prints.read_text()
    assert checkpoint_of(run)["step"] == 6


def test_other_data_is_refused_unless_the_epoch_may_start_again(options, photos, tmp_path) -> None:
    """A run that was started again goes on where it was, not where it branched off."""
    stopped, branch = tmp_path / "stopped", tmp_path / "branch"
    more, renamed = tmp_path / "more" / photos.name, tmp_path / "renamed" / photos.name
    for root in (more, renamed):
        shutil.copytree(photos, root)
    photo = next(more.glob("train/digit 0/*.png"))
    shutil.copy(photo, photo.with_name("new.png"))
    for split in renamed.iterdir():
        (split / "digit 0").rename(split / "digit 9")
    fresh = [*FRESH, "epochs=1"]
    other = "made with other data or settings ("
    train("train.py", stopped, *options, "max_steps=3")
    rows: list[tuple[str, list[str], int, str]] = [
        ("seed", ["seed=1"], 2, f"{other}seed: 0 then, 1 now)"),
        ("more", [f"data.root={more}"], 2, f"{other}files: "),
        ("renamed", [f"data.root={renamed}", *fresh], 2, "output 0: digit 0 then, digit 1 now"),
        ("fresh", [f"data.root={more}", *fresh], 0, "plan of the data: epoch 1 is restarted"),
        ("branch", ["max_steps=5"], 0, f"resumed from {stopped}"),
        ("branch", ["max_steps=7"], 0, f"resumed from {branch}"),
    ]
    for name, overrides, code, message in rows:
        more = [*overrides, f"resume={stopped}"]
        text = train("train.py", tmp_path / name, *options, *more, code=code)
        assert message in text, f"{name}: {text}"
        assert ("checkpoint.fresh_epoch=true" in text) == (other in message), name
        assert "Traceback" not in text
    for name, step in {"fresh": NUM_STEPS // 2, "branch": 7}.items():
        assert checkpoint_of(tmp_path / name)["step"] == step
    assert (branch / "checkpoints" / "model.safetensors").exists()  # of its own best epoch
