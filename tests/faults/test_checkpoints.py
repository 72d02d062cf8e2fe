"""Damaged checkpoints, a full disk, and when what is kept."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from models.pretrained import MANIFEST, STATE, fingerprint, read_state
from runtime.checkpoint import CheckpointWriter
from runtime.process_group import ProcessGroup
from tests.helpers import make_config
from tests.processes import LIMIT_S, train
from tests.results import (
    assert_same,
    assert_same_state,
    checkpoint_of,
    published,
    step_folder,
    steps_saved,
)


def cut_short(folder: Path) -> None:
    content = (folder / STATE).read_bytes()
    (folder / STATE).write_bytes(content[:-1000])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / STATE).read_bytes())
    content[len(content) // 2] ^= 0x10
    (folder / STATE).write_bytes(content)


def lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def lie(folder: Path) -> None:
    """The manifest has the right names, and sizes of other files."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][STATE]["bytes"] += 1
    (folder / MANIFEST).write_text(json.dumps(manifest))


def name_files_elsewhere(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][f"../../{folder.name}/{STATE}"] = manifest["files"].pop(STATE)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def hold_code(folder: Path) -> None:
    """A pickled module in place of a tensor, and a manifest of that."""
    state = torch.load(folder / STATE, weights_only=True)
    torch.save(state | {"model": nn.Linear(2, 2)}, folder / STATE)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][STATE] = fingerprint(folder / STATE)
    (folder / MANIFEST).write_text(json.dumps(manifest))


DAMAGES = [cut_short, flip_a_bit, lose_the_manifest, lie, name_files_elsewhere, hold_code]


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damaged_checkpoint_is_read(damage: Callable[[Path], None], finished, tmp_path) -> None:
    folder = shutil.copytree(step_folder(finished, 16), tmp_path / "step-00000016")
    (folder / "notes.txt").write_text("a file that somebody has put there does no harm")
    assert read_state(folder)["step"] == 16
    damage(folder)
    with pytest.raises(Exception, match=r"\w") as error:
        read_state(folder)
    assert "weights_only=False" not in str(error.value)  # as PyTorch advises


def test_a_run_goes_on_from_the_checkpoint_before_damaged_ones(finished, options, tmp_path) -> None:
    copy, damaged = (shutil.copytree(finished, tmp_path / name) for name in ("copy", "damaged"))
    dead = copy / "checkpoints" / ".step-00000017.tmp"  # of a write that was killed
    shutil.copytree(step_folder(copy, 15), dead)
    flip_a_bit(step_folder(copy, 15))
    for folder in [step_folder(copy, 16), *damaged.glob("checkpoints/step-*")]:
        cut_short(folder)
    text = train("train.py", copy, *options, "resume=auto")
    for step in (15, 16):
        assert f"{step_folder(copy, step)} is damaged" in text
    assert f"resumed from {step_folder(copy, 10)}: step 10" in text
    assert_same_state(copy, finished)
    assert not dead.exists()
    error = train("train.py", damaged, *options, "resume=auto", code=2)
    assert error.count("is damaged") == 4
    assert "resume=auto: there is no checkpoint that can be read (4 found)" in error


def test_a_run_that_was_killed_as_it_replaced_a_checkpoint_goes_on_from_that(
    finished, options, tmp_path
) -> None:
    """The step's earlier folder had been renamed away, and the new one not yet to its name."""
    run = shutil.copytree(finished, tmp_path / "run")
    for step in (8, 10, 15):
        shutil.rmtree(step_folder(run, step))
    old = step_folder(run, 16)
    old.rename(old.with_name(f".{old.name}.old"))
    text = train("train.py", run, *options, "resume=auto", "epochs=3")
    assert f"{old.name}.old: step 16" in text
    assert steps_saved(run) == [24]
    assert not list(run.glob("checkpoints/.*"))


def test_a_full_disk_leaves_the_checkpoint_before_intact(small_disk, options) -> None:
    """It has room for one of 0.7 MB, but not for two. TensorBoard and the log lie there, too."""
    run = small_disk / "run"
    options = [*options, "model.kwargs.width=30", "checkpoint.best=false"]  # 0.7 MB
    options += ["checkpoint.every_steps=5", "resume=auto"]
    for on_error, code, steps in [("raise", 1, [8]), ("warn", 0, [8, 10, 15, 16])]:
        text = train("train.py", run, *options, f"checkpoint.on_error={on_error}", code=code)
        for step in steps:
            assert f"step-{step:08d} could not be written" in text, text
        assert "earlier checkpoints are untouched" in text
        assert ("training continues (checkpoint.on_error=warn)" in text) == (on_error == "warn")
        assert checkpoint_of(run)["step"] == 5
        names = {path.name for path in (run / "checkpoints").iterdir()}
        assert names == {"step-00000005"}  # nothing half-written


def test_checkpoints_are_kept_as_configured(finished) -> None:
    """Each fifth step and each epoch; of five, the oldest one is gone."""
    assert steps_saved(finished) == [8, 10, 15, 16]
    files = [path for path in (finished / "checkpoints").rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # as the umask says
    names = {path.name for path in step_folder(finished, 10).iterdir()}
    assert names == {STATE, MANIFEST}
    best = checkpoint_of(finished, best=True)
    assert best["step"] in (8, 16)  # at the end of an epoch
    assert_same(load_file(finished / "checkpoints" / "model.safetensors"), best["model"])


def test_what_training_changes_while_a_checkpoint_is_written_is_not_in_it(tmp_path) -> None:
    goes_on = threading.Event()

    class Slow(ProcessGroup):
        def broadcast_from_rank0(self, read: Callable[[], Any]) -> Any:
            assert goes_on.wait(LIMIT_S)
            return super().broadcast_from_rank0(read)

    weight = torch.ones(2)
    writer = CheckpointWriter(make_config().checkpoint, tmp_path / "checkpoints", Slow())
    writer.write({"step": 1, "model": {"weight": weight}, "facts": {}}, True)
    weight.zero_()
    goes_on.set()
    writer.wait()
    assert checkpoint_of(tmp_path)["model"]["weight"].tolist() == [1, 1]
    assert published(tmp_path)["weight"].tolist() == [1, 1]


def test_steps_that_a_run_has_left_go_before_older_ones_and_the_best_one_stays(tmp_path) -> None:
    """It went on from an earlier step, as with a larger batch or before a damaged checkpoint."""
    writer = CheckpointWriter(make_config("checkpoint.keep=2").checkpoint, tmp_path / "checkpoints")
    state = {"model": {"weight": torch.ones(2)}, "facts": {}}
    for step, is_best, kept in [
        *((5, False, [5]), (9, True, [5, 9]), (6, False, [5, 6]), (3, False, [3])),
        *((4, True, [3, 4]), (7, False, [4, 7]), (8, False, [4, 7, 8]), (9, True, [8, 9])),
    ]:
        writer.write(state | {"step": step}, is_best)
        writer.wait()
        assert steps_saved(tmp_path) == kept
