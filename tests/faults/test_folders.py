"""One run at a time in a folder, and what a run may go on from."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from conf.errors import UserError
from runtime.trained import read_trained
from tests.faults import script_with, steps_saved, wait_for_step
from tests.helpers import (
    ENVIRONMENT,
    answers_to,
    checkpoint_of,
    events_of,
    folder_with,
    fork,
    join,
    scalars_of,
    values_of,
    wait_for,
)

LONGER = ["resume=auto", "epochs=3"]
INPUTS = [*LONGER, "data.mean=[0.5,0.5,0.5]"]
RATES = ["optimizer.lr=0.001", "optimizer.weight_decay=0.5", "global_batch_size=16"]
REFUSED = {
    "already contains a run; resume=auto continues it,": [],
    "optimizer.name: adamw then, sgd now": [*LONGER, "optimizer=sgd"],
    "optimizer.kwargs.amsgrad: None then": [*LONGER, "+optimizer.kwargs.amsgrad=true"],
    "resume with model.kwargs.width=": [*LONGER, "model.kwargs.width=16"],
    "model.freeze: None then, backbone now": [*LONGER, "model.freeze=backbone"],
    "(data.mean: [0.485, 0.456, 0.406] then, [0.5, 0.5, 0.5] now)": INPUTS,
}
"""Options of runs that do not fit the folder of a finished one, by what their messages name."""


def in_copies(
    finished: Path, options: list[str], folder: Path, *others: list[str]
) -> list[tuple[Path, int, str]]:
    """The folder, exit code and prints of runs with other options, each in a copy of a folder."""
    runs = [folder / str(number) for number in range(len(others))]
    for run in runs:
        shutil.copytree(finished, run, copy_function=shutil.copy)
    first = ["train.py", *options]
    commands = [
        [*first, f"output_dir={run}", *more] for run, more in zip(runs, others, strict=True)
    ]
    return [(run, *told) for run, told in zip(runs, answers_to(commands, folder), strict=True)]


def texts_of(run: Path) -> dict[str, str]:
    """The names of all files, and the text of those that are no log."""
    return {
        str(path.relative_to(run)): path.read_text() if path.suffix in (".json", ".yaml") else ""
        for path in run.rglob("*")
    }


def test_a_run_that_does_not_fit_the_folder_is_refused_and_changes_nothing(
    finished, options, tmp_path
) -> None:
    told = in_copies(finished, options, tmp_path, *REFUSED.values())
    for message, (run, code, text) in zip(REFUSED, told, strict=True):
        assert code == 2, text
        assert "Traceback" not in text
        assert message in text.splitlines()[-1]
        assert str(run) in text.splitlines()[-1]
        assert texts_of(run) == texts_of(finished)


def test_overwrite_removes_the_earlier_run_and_what_may_change_is_listed_and_followed(
    finished, options, tmp_path
) -> None:
    intended = [*INPUTS, "checkpoint.fresh_epoch=true"]
    others = ["overwrite=true", "max_steps=3", "log.images=4"], intended, [*LONGER, *RATES]
    told = in_copies(finished, options, tmp_path, *others)
    (new, *_), _, (run, *_) = told
    assert [code for _, code, _ in told] == [0, 0, 0], told
    assert steps_saved(new) == [3]
    assert [step for step, _ in scalars_of(new, "train/loss")] == [1, 2, 3]
    assert len(list(new.glob("events.*"))) == 1
    images = {"train/inputs"}
    images |= {"val/predictions", "val/confusion"}  # part: pictures
    assert set(events_of(new).Tags()["images"]) == images

    inputs, rates = (text.partition("settings that have changed")[2] for *_, text in told[1:])
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
        assert "checkpoints/step-*.pt" in text.splitlines()[-1]
        assert "Traceback" not in text
    for run in runs:
        assert steps_saved(run) == [3]
        assert [step for step, _ in scalars_of(run, "train/loss")] == [1, 2, 3]
        assert len(list(run.glob("events.*"))) == 1


def test_a_folder_belongs_to_one_run_until_it_ends_for_which_one_that_torchrun_restarts_waits(
    options, tmp_path, monkeypatch
) -> None:
    script, run = "train_ddp.py", tmp_path / "run"
    folder = script_with(tmp_path / "s", script, "if step == 3: time.sleep(1000)")
    ranks, _ = fork(script, run, *options, "checkpoint.every_steps=1", folder=folder)
    wait_for_step(run, 2)
    again = ["train.py", *options, f"output_dir={run}", "resume=auto"]
    [(code, text)] = answers_to([again], tmp_path)
    assert code == 2
    assert text.startswith(f"output_dir={run} belongs to a run that is still going; ")
    later, begins = folder_with(tmp_path / "later", "train.py"), tmp_path / "begins"
    text = (later / "train.py").read_text()
    mark = f"    open({str(begins)!r}, 'w').close()\n    run = Run("
    (later / "train.py").write_text(text.replace("    run = Run(", mark))
    monkeypatch.setitem(ENVIRONMENT, "TORCHELASTIC_MAX_RESTARTS", "3")
    restarted = [*options, "resume=auto", "max_steps=6"]
    [waiting], [prints] = fork("train.py", run, *restarted, folder=later)
    wait_for(begins.exists, "a run that asks for the folder")
    time.sleep(1)
    for rank in ranks:
        rank.kill()
    join(ranks)
    assert join([waiting]) == [0], prints.read_text()
    assert "step-00000002.pt: step 2" in prints.read_text()
    assert checkpoint_of(run)["step"] == 6


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("config.yaml", b"optimizer:", b"optimizer:\n  momentum: 0.9", "optimizer.kwargs.momentum"),
        ("config.yaml", b"epochs: 2", b"epochs: !!python/name:os.system", "damaged"),
        ("run.json", b"{", b"[" * 10_000, "damaged"),
        ("run.json", b'"target"', b'"other"', "no 'target'"),
        ("checkpoints/model.safetensors", b"{", b"[", "model.safetensors"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_in_one_line(
    name: str, old: bytes, new: bytes, message: str, finished, tmp_path
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run", copy_function=shutil.copy))
    content = (run / name).read_bytes()
    assert old in content
    (run / name).write_bytes(content.replace(old or content, new, 1))
    with pytest.raises(UserError, match=message) as error:
        read_trained(run, [])
    assert str(run / name) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
