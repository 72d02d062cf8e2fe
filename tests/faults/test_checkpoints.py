"""Damaged checkpoints, a full disk, and when what is kept."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models import build_model
from runtime.checkpoint import CheckpointWriter, read_checkpoint
from tests.faults.helpers import (
    NUM_STEPS,
    assert_same,
    assert_same_state,
    run_to_end,
    script_with,
    steps_saved,
)
from tests.helpers import checkpoint_of, folder_with, make_config, scalars_of, summary_of, train


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory):
    """Output folder of a run that kept its last three steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train("train.py", folder, *options, "checkpoint.every_steps=1", "checkpoint.keep=3")
    return folder


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", copy_function=shutil.copy))


def step_file(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.pt"


def flip_byte(path: Path, share: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def read(run: Path, resume: str = "auto"):
    """What a run in this folder would load."""
    state = read_checkpoint(resume, run / "checkpoints")
    assert state is not None
    return state


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99, 1.0])
def test_one_flipped_byte_is_found_and_the_checkpoint_before_is_used(
    share: float, copy, caplog
) -> None:
    whole = torch.load(step_file(copy, NUM_STEPS), weights_only=True)
    flip_byte(step_file(copy, NUM_STEPS), share)
    state = read(copy)
    if state["step"] == NUM_STEPS:  # a byte that means nothing, such as a date in the archive
        whole["path"] = state["path"]
        assert_same(state, whole)
    else:
        assert state["step"] == NUM_STEPS - 1
        assert f"{step_file(copy, NUM_STEPS)} is damaged" in caplog.text


def test_a_flipped_byte_in_the_weights_is_not_loaded(copy, caplog) -> None:
    path = step_file(copy, NUM_STEPS)
    weight = checkpoint_of(copy)["model"]["classifier.weight"].numpy().tobytes()
    content = path.read_bytes()
    assert content.count(weight) == 1
    flip_byte(path, (content.index(weight) + 5) / (len(content) - 1))
    assert torch.load(path, weights_only=True)["step"] == NUM_STEPS  # torch.load does not see it
    assert read(copy)["step"] == NUM_STEPS - 1
    assert f"{path} is damaged" in caplog.text


def test_a_run_goes_on_from_the_checkpoint_before_a_truncated_one(copy, finished, options) -> None:
    cut_short(step_file(copy, NUM_STEPS))
    flip_byte(step_file(copy, NUM_STEPS - 1), 0.5)
    printed = train("train.py", copy, *options, "resume=auto")
    for step in (NUM_STEPS, NUM_STEPS - 1):
        assert f"{step_file(copy, step)} is damaged" in printed
    assert f"resumed from {step_file(copy, NUM_STEPS - 2)}: step {NUM_STEPS - 2}" in printed
    assert_same_state(copy, finished)


def test_when_all_checkpoints_are_damaged_the_run_stops(copy, options) -> None:
    for step in steps_saved(copy):
        cut_short(step_file(copy, step))
    codes, [text] = run_to_end("train.py", copy, *options, "resume=auto")
    assert codes == [2]
    assert text.count("is damaged") == 3
    assert "resume=auto: there is no checkpoint that can be read (3 found)" in text


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


WIDE = ["model.kwargs.width=30", "checkpoint.best=false", "log.images=0"]  # 0.7 MB


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_leaves_the_checkpoint_before_intact(
    on_error: str, small_disk, options
) -> None:
    """TensorBoard and the log lie on the same disk."""
    run = small_disk / "run"
    overrides = [*WIDE, "checkpoint.every_steps=5", f"checkpoint.on_error={on_error}"]
    codes, [text] = run_to_end("train.py", run, *options, *overrides)
    assert codes == [0 if on_error == "warn" else 1], text
    failed = [8, 10, 15, 16] if on_error == "warn" else [8]
    for step in failed:
        message = (
            rf"step-{step:08d}.pt could not be written \(.*\): about 0.\d MB needed, 0.\d MB free"
        )
        assert re.search(message, text), text
    assert "earlier checkpoints are untouched" in text
    assert ("training goes on (checkpoint.on_error=warn)" in text) == (on_error == "warn")
    assert steps_saved(run) == [5]
    assert read(run)["step"] == 5
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step-00000005.pt", "last.pt"}  # nothing half-written


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["checkpoint.every_steps=3", "checkpoint.keep=3"], [12, 15, 16]),
        (["checkpoint.every_steps=5", "checkpoint.keep=99"], [5, 8, 10, 15, 16]),
        (["checkpoint.keep=1"], [16]),
    ],
)
def test_checkpoints_are_kept_as_configured(overrides, steps, options, tmp_path) -> None:
    run = tmp_path / "run"
    train("train.py", run, *options, *overrides)
    assert steps_saved(run) == steps
    newest = step_file(run, NUM_STEPS)
    assert (run / "checkpoints" / "last.pt").read_bytes() == newest.read_bytes()
    modes = {path.stat().st_mode for path in (run / "checkpoints").iterdir()}
    assert len(modes) == 1  # as the umask says
    best = checkpoint_of(run, "best.pt")
    assert best["step"] in (8, 16)  # at the end of an epoch
    cfg = make_config(*options, *overrides)
    model = build_model(cfg.model, 3, 2)
    model.load_state_dict(load_file(run / "checkpoints" / "model.safetensors"))
    assert_same(dict(model.state_dict()), dict(best["model"]))
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {step_file(run, step).name for step in steps} | {
        "last.pt",
        "best.pt",
        "model.safetensors",
    }


def test_steps_that_a_run_has_left_go_before_older_ones(tmp_path) -> None:
    """It went on from an earlier step, as with a larger batch or before a damaged checkpoint."""
    writer = CheckpointWriter(make_config("checkpoint.keep=2").checkpoint, tmp_path / "checkpoints")
    for step, kept in [(5, [5]), (9, [5, 9]), (6, [5, 6]), (3, [3]), (4, [3, 4]), (7, [4, 7])]:
        writer.write({"step": step})
        writer.wait()
        assert steps_saved(tmp_path) == kept


def test_an_error_where_no_folder_can_be_made_is_told_too(tmp_path) -> None:
    (tmp_path / "file").touch()
    writer = CheckpointWriter(make_config().checkpoint, tmp_path / "file" / "checkpoints")
    writer.write({"step": 1, "model": torch.zeros(250_000)})
    with pytest.raises(OSError, match=r"step-00000001.pt .*Not a directory.* 1.0 MB needed"):
        writer.wait()


def test_an_epoch_whose_weights_could_not_be_written_is_not_the_best(options, tmp_path) -> None:
    """The first epoch's, since a folder is in the way; those of the second one, which unlearns, are worse."""
    script, run = "train_ddp_ema.py", tmp_path / "run"
    weights = run / "checkpoints" / "model.safetensors"
    (weights / "folder").mkdir(parents=True)
    folder = script_with(
        tmp_path / "s",
        script,
        "import shutil",
        "if step > 8: targets.copy_(1 - targets)",
        f"if step == 12 and rank == 0: shutil.rmtree({str(weights)!r})",
    )
    codes, [text, *_] = run_to_end(
        script, run, *options, "checkpoint.on_error=warn", folder=folder, timeout=240
    )
    assert set(codes) == {0}, text
    assert f"{weights} could not be written" in text
    assert steps_saved(run) == [16]
    best = checkpoint_of(run, "best.pt")
    assert best["step"] == 16
    assert best["run"]["best_metrics"] == summary_of(run)["best"]
    assert weights.is_file()


def test_what_was_best_counts_where_its_weights_lie(copy, tmp_path) -> None:
    saved = checkpoint_of(copy)["run"]
    assert saved["best"] > 0
    assert read(copy)["run"] == read(copy, str(copy))["run"] == saved
    branch = read(tmp_path / "branch", str(copy))["run"]
    assert branch == saved | {"best": float("-inf"), "best_metrics": {}}


def test_the_remains_of_a_write_that_was_killed_are_removed(copy, options) -> None:
    names = (".step-00000017.4711.pt", ".model.4711.safetensors")
    remains = [copy / "checkpoints" / name for name in names]
    for path in remains:
        path.write_bytes(b"half")
    train("train.py", copy, *options, "epochs=3", "max_steps=17", "resume=auto")
    assert checkpoint_of(copy)["step"] == 17
    assert not any(path.exists() for path in remains)


def test_training_goes_on_while_one_checkpoint_is_written(tmp_path, options) -> None:
    """A write, which the steps 4 and 8 ask for, ends here only when step 8 has begun."""
    folder = script_with(
        tmp_path / "s",
        "train.py",
        "import json, torch",
        "seen = globals().setdefault('seen', [])",
        "seen.append(f'step {step}')",
        "if step == 1:",
        "    real = torch.save",
        "    def slow_save(*arguments):",
        "        seen.append('begin')",
        "        end = time.monotonic() + 120",
        "        while 'step 8' not in seen and time.monotonic() < end: time.sleep(0.01)",
        "        real(*arguments)",
        "        seen.append('end')",
        "    torch.save = slow_save",
        f"open({str(tmp_path / 'seen.json')!r}, 'w').write(json.dumps(seen))",
    )
    train("train.py", tmp_path / "run", *options, "checkpoint.every_steps=4", folder=folder)
    order = json.loads((tmp_path / "seen.json").read_text())
    begin, end = order.index("begin"), order.index("end")
    # Step 5 may come before the thread that writes begins.
    assert {"step 6", "step 7", "step 8"} <= set(order[begin:end])
    writes = [what for what in order if not what.startswith("step")]
    assert writes[:4] == ["begin", "end", "begin", "end"]  # never two at a time


OWN_LOGGERS = """
from runtime.loggers.tensorboard import TensorBoardLogger

class FullDisk(TensorBoardLogger):
    def log(self, values, step):
        if 4 <= step <= 8:
            raise OSError(28, "No space left on device")
        super().log(values, step)

class NoServer(TensorBoardLogger):
    def __init__(self, run_dir, settings, step):
        raise OSError(111, "Connection refused")
"""


def test_training_goes_on_while_a_logger_cannot_write(options, tmp_path) -> None:
    folder = folder_with(tmp_path / "s", "train.py")
    script = folder / "train.py"
    text = script.read_text()
    (folder / "own_loggers.py").write_text(OWN_LOGGERS)
    own = """
    from runtime.loggers import LOGGERS

    LOGGERS["full"] = "own_loggers.FullDisk"
    LOGGERS["service"] = "own_loggers.NoServer"
"""
    script.write_text(text.replace("    # data\n", own))
    names = "log.to=[full,service]"
    printed = train("train.py", tmp_path / "run", *options, names, folder=folder)
    assert printed.count("log.to=full: values are lost until the next epoch") == 1
    assert "log.to=service: values are lost until the next epoch" in printed
    steps = [step for step, _ in scalars_of(tmp_path / "run", "train/loss")]
    assert steps == [1, 2, 3, *range(9, NUM_STEPS + 1)]
    assert summary_of(tmp_path / "run")["steps"] == NUM_STEPS
