"""Damaged checkpoints, a full disk, and when what is kept."""

import re
import shutil

import torch
from safetensors.torch import load_file
from torch import nn

from runtime.checkpoint import CheckpointWriter
from tests.faults import NUM_STEPS, assert_same, assert_same_state, step_file, steps_saved
from tests.helpers import answers_to, checkpoint_of, make_config, run_to_end


def test_a_run_goes_on_from_the_checkpoint_before_damaged_ones(finished, options, tmp_path) -> None:
    copy, damaged = (shutil.copytree(finished, tmp_path / name) for name in ("copy", "damaged"))
    names = (".step-00000017.4711.pt", ".model.4711.safetensors")
    remains = [copy / "checkpoints" / name for name in names]
    for path in remains:  # of a write that was killed
        path.write_bytes(b"half")
    content = bytearray(step_file(copy, 15).read_bytes())
    content[len(content) // 2] ^= 0x10
    step_file(copy, 15).write_bytes(content)
    for path in [step_file(copy, 16), *damaged.glob("checkpoints/step-*")]:
        path.write_bytes(path.read_bytes()[:-1000])
    resumed = ["train.py", *options, "resume=auto"]
    commands = [[*resumed, f"output_dir={run}"] for run in (copy, damaged)]
    (code, text), (stopped, error) = answers_to(commands, tmp_path)
    assert code == 0, text
    for step in (15, 16):
        assert f"{step_file(copy, step)} is damaged" in text
    assert f"resumed from {step_file(copy, 10)}: step 10" in text
    assert_same_state(copy, finished)
    assert not any(path.exists() for path in remains)
    assert stopped == 2
    assert error.count("is damaged") == 4
    assert "resume=auto: there is no checkpoint that can be read (4 found)" in error


def test_nobody_is_advised_to_run_what_is_pickled_in_a_checkpoint(options, tmp_path) -> None:
    torch.save(nn.Linear(2, 2), pickled := tmp_path / "pickled.pt")
    command = ["train.py", *options, f"output_dir={tmp_path / 'run'}", f"resume={pickled}"]
    [(code, text)] = answers_to([command], tmp_path)
    assert code == 2
    assert str(pickled) in text
    assert "Weights only load failed" not in text  # as PyTorch goes on to tell how it would not


def test_a_full_disk_leaves_the_checkpoint_before_intact(small_disk, options) -> None:
    """It has room for one of 0.7 MB, but not for two. TensorBoard and the log lie there, too."""
    run = small_disk / "run"
    options = [*options, "model.kwargs.width=30", "checkpoint.best=false"]  # 0.7 MB
    options += ["checkpoint.every_steps=5", "resume=auto"]
    for on_error, code, steps in [("raise", 1, [8]), ("warn", 0, [8, 10, 15, 16])]:
        codes, [text] = run_to_end("train.py", run, *options, f"checkpoint.on_error={on_error}")
        assert codes == [code], text
        for step in steps:
            room = r"about 0.\d MB needed, 0.\d MB free"
            assert re.search(rf"step-{step:08d}.pt could not be written \(.*\): {room}", text), text
        assert "earlier checkpoints are untouched" in text
        assert ("training continues (checkpoint.on_error=warn)" in text) == (on_error == "warn")
        assert checkpoint_of(run)["step"] == 5
        names = {path.name for path in (run / "checkpoints").iterdir()}
        assert names == {"step-00000005.pt", "last.pt"}  # nothing half-written


def test_checkpoints_are_kept_as_configured(finished) -> None:
    """Each fifth step and each epoch; of five, the oldest one is gone."""
    files = {path.name: path for path in (finished / "checkpoints").iterdir()}
    links = {"last.pt", "best.pt", "model.safetensors"}
    assert files.keys() == links | {step_file(finished, step).name for step in (8, 10, 15, 16)}
    assert files["last.pt"].read_bytes() == step_file(finished, NUM_STEPS).read_bytes()
    assert len({path.stat().st_mode for path in files.values()}) == 1  # as the umask says
    best = checkpoint_of(finished, "best.pt")
    assert best["step"] in (8, 16)  # at the end of an epoch
    assert_same(load_file(files["model.safetensors"]), dict(best["model"]))


def test_equal_weights_make_equal_files(tmp_path) -> None:
    facts = dict.fromkeys(("classes", "target", "in_channels", "dtype", "precision"), "x")
    for run in "abcd":
        writer = CheckpointWriter(make_config().checkpoint, tmp_path / run)
        writer.write({"step": 1, "model": {"weight": torch.ones(2)}, "facts": facts}, True)
        writer.wait()
    contents = {path.read_bytes() for path in tmp_path.glob("*/model.safetensors")}
    assert len(contents) == 1


def test_steps_that_a_run_has_left_go_before_older_ones(tmp_path) -> None:
    """It went on from an earlier step, as with a larger batch or before a damaged checkpoint."""
    writer = CheckpointWriter(make_config("checkpoint.keep=2").checkpoint, tmp_path / "checkpoints")
    for step, kept in [(5, [5]), (9, [5, 9]), (6, [5, 6]), (3, [3]), (4, [3, 4]), (7, [4, 7])]:
        writer.write({"step": step})
        writer.wait()
        assert steps_saved(tmp_path) == kept
