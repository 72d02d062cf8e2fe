"""One run at a time in a folder, and what a run may go on from."""

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

import torch

from tests.faults import script_with, steps_saved, wait_for_step
from tests.helpers import (
    ENVIRONMENT,
    answers_to,
    checkpoint_of,
    folder_with,
    fork,
    join,
    replace,
    scalars_of,
    values_of,
    wait_for,
)

LONGER = ["resume=auto", "epochs=3"]
INPUTS = [*LONGER, "data.mean=[0.5,0.5,0.5]"]
REFUSED = {
    "already contains a run; resume=auto continues it,": [],
    "optimizer.name: adamw then, sgd now": [*LONGER, "optimizer=sgd"],
    "optimizer.kwargs.amsgrad: None then": [*LONGER, "+optimizer.kwargs.amsgrad=true"],
    "resume with model.kwargs.width=": [*LONGER, "model.kwargs.width=16"],
    "model.freeze: None then, backbone now": [*LONGER, "model.freeze=backbone"],
    "(data.mean: [0.485, 0.456, 0.406] then, [0.5, 0.5, 0.5] now)": INPUTS,
}
"""Options of runs that do not fit the folder of a finished one, by what their messages name."""
FITTING = [
    ["overwrite=true", "max_steps=3"],
    [*INPUTS, "checkpoint.fresh_epoch=true"],
    [*LONGER, "optimizer.lr=0.001", "optimizer.weight_decay=0.5", "global_batch_size=16"],
]


def texts_of(run: Path) -> dict[str, str]:
    """The names of all files, and the text of those that are no log."""
    return {
        str(path.relative_to(run)): path.read_text() if path.suffix in (".json", ".yaml") else ""
        for path in run.rglob("*")
    }


def test_a_folder_refuses_what_does_not_fit_and_lists_the_rest(finished, options, tmp_path) -> None:
    """Each in a copy of the folder. `overwrite=true` removes the earlier run."""
    others = [*REFUSED.values(), *FITTING]
    runs = [shutil.copytree(finished, tmp_path / str(number)) for number in range(len(others))]
    (runs[len(REFUSED)] / "mlflow_id").write_text("of the earlier run")
    outputs = [[f"output_dir={run}", *more] for run, more in zip(runs, others, strict=True)]
    told = answers_to([["train.py", *options, *output] for output in outputs], tmp_path)
    for message, run, (code, text) in zip(REFUSED, runs, told, strict=False):
        assert code == 2, text
        assert "Traceback" not in text
        assert message in text.splitlines()[-1]
        assert str(run) in text.splitlines()[-1]
        assert texts_of(run) == texts_of(finished)

    new, _, run = runs[-3:]
    assert [code for code, _ in told[-3:]] == [0, 0, 0], told
    assert steps_saved(new) == [3]
    assert [step for step, _ in scalars_of(new, "train/loss")] == [1, 2, 3]
    assert len(list(new.glob("events.*"))) == 1
    assert not (new / "mlflow_id").exists()

    inputs, rates = (text.partition("settings that have changed")[2] for _, text in told[-2:])
    assert ": data.mean: [0.485, 0.456, 0.406] then" in inputs
    for change in ("lr: 0.003 then, 0.001 now", "weight_decay: 0.01 then, 0.5 now"):
        assert f"optimizer.{change}" in rates
    assert "global_batch_size: 8 then, 16 now" in rates
    [group] = checkpoint_of(run)["optimizer"]["param_groups"]
    assert (group["weight_decay"], group["initial_lr"]) == (0.5, 0.001)
    followed = values_of(run, "train/lr")[-4:]  # the last epoch, at 16 a step
    assert 0 < max(followed) < 0.001


def test_a_file_of_weights_is_no_checkpoint_and_a_run_that_saved_none_starts_again(
    finished, options, tmp_path
) -> None:
    """A run that failed before its first step has no events either, and leaves its folder free."""
    files = [finished / "checkpoints" / "model.safetensors", tmp_path / "plain.pt"]
    torch.save(checkpoint_of(finished)["model"], files[1])
    runs = [tmp_path / name for name in ("first", "second")]
    failing = script_with(tmp_path / "s", "train.py", "assert step == 3 or step < cfg.max_steps")
    first, second = (["train.py", *options, f"output_dir={run}"] for run in runs)
    commands = [["train.py", *options, f"output_dir={tmp_path}/x", f"resume={f}"] for f in files]
    commands += [[*first, "max_steps=1"], [*second, "max_steps=2"]]
    commands += [[*first, "max_steps=3"], [*second, "max_steps=3", "resume=auto"]]
    told = answers_to(commands, tmp_path, folder=failing)
    assert [code for code, _ in told] == [2, 2, 1, 1, 0, 0], told
    for path, (_, text) in zip(files, told[:2], strict=True):
        assert f"\nresume={path}: " in f"\n{text}"
        assert "checkpoints/step-*" in text.splitlines()[-1]
        assert "Traceback" not in text
    for run in runs:
        assert steps_saved(run) == [3]
        assert [step for step, _ in scalars_of(run, "train/loss")] == [1, 2, 3]
        assert len(list(run.glob("events.*"))) == 1


def test_a_folder_belongs_to_one_run_until_it_ends_for_which_one_that_torchrun_restarts_waits(
    options, tmp_path, monkeypatch
) -> None:
    script, run, begins = "train.py", tmp_path / "run", tmp_path / "begins"
    folder = script_with(tmp_path / "s", script, "if step == 3: time.sleep(1000)")
    options = [*options, "checkpoint.every_steps=1"]
    [process], _ = fork(script, run, *options, folder=folder)
    wait_for_step(run, 2)
    others = [[script, *options, f"output_dir={run}", "resume=auto"]]
    for code, text in answers_to(others, tmp_path):
        assert code == 2
        assert f"output_dir={run} belongs to a run that is still going; " in text
    later = folder_with(tmp_path / "later", script)
    mark = f"    open({str(begins)!r}, 'w').close()\n    run = Run("
    replace(later / script, "    run = Run(", mark)
    monkeypatch.setitem(ENVIRONMENT, "TORCHELASTIC_MAX_RESTARTS", "3")
    options += ["resume=auto", "max_steps=6"]
    [waiting], [prints] = fork(script, run, *options, folder=later)
    wait_for(begins.exists, "a run that asks for the folder")
    time.sleep(1)
    process.kill()
    assert join([waiting]) == [0], prints.read_text()
    assert "step-00000002: step 2" in prints.read_text()
    assert checkpoint_of(run)["step"] == 6


def test_a_read_only_folder_is_named(options, small_disk, tmp_path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    place = small_disk / "run"
    [(code, text)] = answers_to([["train.py", *options, f"output_dir={place}"]], tmp_path)
    assert code == 2, text
    [line] = text.splitlines()
    assert str(place) in line
    assert os.strerror(errno.EROFS) in line
