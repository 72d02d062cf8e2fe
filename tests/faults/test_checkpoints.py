"""Damaged checkpoints, a full disk, and when what is kept."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from runtime.checkpoint import CheckpointWriter
from tests.faults import (
    NUM_STEPS,
    assert_same,
    assert_same_state,
    flip_byte,
    script_with,
    step_file,
    steps_saved,
)
from tests.helpers import (
    answers_to,
    checkpoint_of,
    make_config,
    run_to_end,
    scalars_of,
    summary_of,
    train,
)


def test_a_run_goes_on_from_the_checkpoint_before_damaged_ones_and_stops_if_all_are(
    finished, options, tmp_path
) -> None:
    copy, damaged = (
        Path(shutil.copytree(finished, tmp_path / name, copy_function=shutil.copy))
        for name in ("copy", "damaged")
    )
    names = (".step-00000017.4711.pt", ".model.4711.safetensors")
    remains = [copy / "checkpoints" / name for name in names]
    for path in remains:  # of a write that was killed
        path.write_bytes(b"half")
    flip_byte(step_file(copy, NUM_STEPS - 1))
    for path in [step_file(copy, NUM_STEPS), *(step_file(damaged, n) for n in (14, 15, 16))]:
        path.write_bytes(path.read_bytes()[:-1000])
    resumed = ["train.py", *options, "resume=auto"]
    commands = [[*resumed, f"output_dir={run}"] for run in (copy, damaged)]
    (code, text), (stopped, error) = answers_to(commands, tmp_path)
    assert code == 0, text
    for step in (NUM_STEPS, NUM_STEPS - 1):
        assert f"{step_file(copy, step)} is damaged" in text
    assert f"resumed from {step_file(copy, NUM_STEPS - 2)}: step {NUM_STEPS - 2}" in text
    assert_same_state(copy, finished)
    assert not any(path.exists() for path in remains)
    assert stopped == 2
    assert error.count("is damaged") == 3
    assert "resume=auto: there is no checkpoint that can be read (3 found)" in error


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for one checkpoint of `WIDE`, but not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


WIDE = ["model.kwargs.width=30", "checkpoint.best=false"]  # 0.7 MB


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_leaves_the_checkpoint_before_intact(
    on_error: str, small_disk, options
) -> None:
    """TensorBoard and the log lie on the same disk."""
    run = small_disk / "run"
    overrides = [*WIDE, "checkpoint.every_steps=5", f"checkpoint.on_error={on_error}"]
    codes, [text] = run_to_end("train.py", run, *options, *overrides)
    assert codes == [0 if on_error == "warn" else 1], text
    for step in [8, 10, 15, 16] if on_error == "warn" else [8]:
        room = r"about 0.\d MB needed, 0.\d MB free"
        assert re.search(rf"step-{step:08d}.pt could not be written \(.*\): {room}", text), text
    assert "earlier checkpoints are untouched" in text
    assert ("training continues (checkpoint.on_error=warn)" in text) == (on_error == "warn")
    assert checkpoint_of(run)["step"] == 5
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step-00000005.pt", "last.pt"}  # nothing half-written


def test_checkpoints_are_kept_as_configured(finished, options, tmp_path) -> None:
    every, one = tmp_path / "every", tmp_path / "one"
    common = ["train.py", *options]
    kept = ["checkpoint.every_steps=5", "checkpoint.keep=99"]
    commands = [[*common, f"output_dir={every}", *kept]]
    commands += [[*common, f"output_dir={one}", "checkpoint.keep=1"]]
    assert [code for code, _ in answers_to(commands, tmp_path)] == [0, 0]
    for run, steps in {finished: [14, 15, 16], every: [5, 8, 10, 15, 16], one: [16]}.items():
        folder = run / "checkpoints"
        files = {path.name: path for path in folder.iterdir()}
        links = {"last.pt", "best.pt", "model.safetensors"}
        assert files.keys() == links | {step_file(run, step).name for step in steps}
        assert files["last.pt"].read_bytes() == step_file(run, NUM_STEPS).read_bytes()
        assert len({path.stat().st_mode for path in files.values()}) == 1  # as the umask says
        best = checkpoint_of(run, "best.pt")
        assert best["step"] in (8, 16)  # at the end of an epoch
        assert_same(load_file(files["model.safetensors"]), dict(best["model"]))


def test_steps_that_a_run_has_left_go_before_older_ones(tmp_path) -> None:
    """It went on from an earlier step, as with a larger batch or before a damaged checkpoint."""
    writer = CheckpointWriter(make_config("checkpoint.keep=2").checkpoint, tmp_path / "checkpoints")
    for step, kept in [(5, [5]), (9, [5, 9]), (6, [5, 6]), (3, [3]), (4, [3, 4]), (7, [4, 7])]:
        writer.write({"step": step})
        writer.wait()
        assert steps_saved(tmp_path) == kept


LOST = """
from runtime.loggers.tensorboard import TensorBoardLogger

class FullDisk(TensorBoardLogger):
    def log(self, values, step):
        if 4 <= step <= 8:
            raise OSError(28, "No space left on device")
        super().log(values, step)

class NoServer(TensorBoardLogger):
    def __init__(self, run_dir, settings, step):
        raise RuntimeError("a bug")
"""


def test_training_goes_on_while_a_logger_cannot_write(options, tmp_path) -> None:
    folder, run = script_with(tmp_path / "s", "train.py"), tmp_path / "run"
    (folder / "own_loggers.py").write_text(LOST)
    script = folder / "train.py"
    own = "LOGGERS |= {'full': 'own_loggers.FullDisk', 'service': 'own_loggers.NoServer'}\n"
    script.write_text(f"from runtime.loggers import LOGGERS\n{own}{script.read_text()}")
    printed = train("train.py", run, *options, "log.to=[full,service]", folder=folder)
    assert printed.count("log.to=full: values are lost until the next epoch") == 1
    assert "log.to=service: values are lost until the next epoch" in printed
    assert "RuntimeError: a bug" in printed
    steps = [step for step, _ in scalars_of(run, "train/loss")]
    assert steps == [1, 2, 3, *range(9, NUM_STEPS + 1)]
    assert summary_of(run)["steps"] == NUM_STEPS
