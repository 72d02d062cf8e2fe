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
    wait_for,
)

LONGER = ["resume=auto", "epochs=3"]
INPUTS = [*LONGER, "data.mean=[0.5,0.5,0.5]"]
RATES = ["optimizer.lr=0.001", "optimizer.weight_decay=0.5", "global_batch_size=16"]
RUNS = {
    "fresh": [],
    "another optimizer": [*LONGER, "optimizer=sgd"],
    "other arguments": [*LONGER, "+optimizer.kwargs.amsgrad=true"],
    "another model": [*LONGER, "model.kwargs.width=16"],
    "another head": [*LONGER, "model.freeze=backbone"],
    "other inputs": INPUTS,
    "overwriting": ["overwrite=true", "max_steps=3"],
    "intended inputs": [*INPUTS, "checkpoint.fresh_epoch=true"],
    "other rates": [*LONGER, *RATES],
}
"""Options of runs, each in a copy of a finished run's folder."""


@pytest.fixture(scope="module")
def ended(finished, options, tmp_path_factory) -> dict[str, tuple[Path, int, str]]:
    """The folder, the exit code and the prints of each of `RUNS`."""
    folder = tmp_path_factory.mktemp("runs")
    for name in RUNS:
        shutil.copytree(finished, folder / name, copy_function=shutil.copy)
    commands = [
        ["train.py", *options, f"output_dir='{folder / name}'", *more]
        for name, more in RUNS.items()
    ]
    told = answers_to(commands, folder)
    return {name: (folder / name, *answer) for name, answer in zip(RUNS, told, strict=True)}


def texts_of(run: Path) -> dict[str, str]:
    """The names of all files, and the text of those that are no log."""
    files = {str(path.relative_to(run)): path for path in run.rglob("*")}
    return {
        name: path.read_text() if path.suffix in (".json", ".yaml") else ""
        for name, path in files.items()
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fresh", "already contains a run; resume=auto continues it,"),
        ("another optimizer", "optimizer.name: adamw then, sgd now"),
        ("other arguments", "optimizer.kwargs.amsgrad: None then"),
        ("another model", "resume with model.kwargs.width="),
        ("another head", "model.freeze: None then, backbone now"),
        ("other inputs", "(data.mean: [0.485, 0.456, 0.406] then, [0.5, 0.5, 0.5] now)"),
    ],
)
def test_a_run_that_does_not_fit_the_folder_is_refused_and_changes_nothing(
    name: str, message: str, ended, finished
) -> None:
    run, code, text = ended[name]
    assert code == 2, text
    assert "Traceback" not in text
    assert message in text.splitlines()[-1]
    assert str(run) in text.splitlines()[-1]
    assert texts_of(run) == texts_of(finished)


def test_overwrite_removes_the_earlier_checkpoints_and_events_first(ended) -> None:
    run, code, text = ended["overwriting"]
    assert code == 0, text
    assert steps_saved(run) == [3]
    assert [step for step, _ in scalars_of(run, "train/loss")] == [1, 2, 3]
    assert len(list(run.glob("events.*"))) == 1
    images = {"train/inputs"}
    images |= {"val/predictions", "val/confusion"}  # part: pictures
    assert set(events_of(run).Tags()["images"]) == images


def test_inputs_may_change_if_that_is_intended(ended) -> None:
    _, code, text = ended["intended inputs"]
    assert code == 0, text
    assert "settings that have changed: data.mean: [0.485, 0.456, 0.406] then" in text


def test_other_rates_are_listed_and_followed(ended) -> None:
    run, code, text = ended["other rates"]
    assert code == 0, text
    line = next(line for line in text.splitlines() if line.startswith("settings that have changed"))
    assert "optimizer.lr: 0.003 then, 0.001 now" in line
    assert "optimizer.weight_decay: 0.01 then, 0.5 now" in line
    assert "global_batch_size: 8 then, 16 now" in line
    [group] = checkpoint_of(run)["optimizer"]["param_groups"]
    assert (group["weight_decay"], group["initial_lr"]) == (0.5, 0.001)
    rates = [rate for _, rate in scalars_of(run, "train/lr")][-4:]  # the last epoch, at 16 a step
    assert 0 < max(rates) < 0.001


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
