"""One run at a time in a folder, and what a run may go on from."""

import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from runtime.folder import claim
from tests.faults.helpers import (
    assert_same_state,
    join,
    run_to_end,
    send,
    slow,
    steps_saved,
    wait_for,
    wait_for_step,
)
from tests.helpers import (
    FORKSERVER,
    checkpoint_of,
    events_of,
    fork,
    make_config,
    scalars_of,
    train,
)


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train("train.py", run, *options)
    return run


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", copy_function=shutil.copy))


def refused(run: Path, *overrides: str) -> str:
    """The one line that ends a run."""
    codes, [text] = run_to_end("train.py", run, *overrides)
    assert codes == [2], text
    assert "Traceback" not in text
    return text.splitlines()[-1]


def test_a_fresh_run_in_the_folder_of_an_earlier_one_is_refused(copy, options) -> None:
    before = sorted(path.name for path in copy.rglob("*"))
    line = refused(copy, *options)
    assert line.startswith(f"output_dir={copy} holds a run already; resume=auto goes on with it,")
    assert sorted(path.name for path in copy.rglob("*")) == before


def test_overwrite_removes_the_earlier_checkpoints_and_events_first(copy, options) -> None:
    train("train.py", copy, *options, "overwrite=true", "max_steps=3")
    assert steps_saved(copy) == [3]
    assert [step for step, _ in scalars_of(copy, "train/loss")] == [1, 2, 3]
    assert len(list(copy.glob("events.*"))) == 1
    assert events_of(copy).Tags()["images"] == ["train/inputs", "val/predictions", "val/confusion"]


@pytest.mark.parametrize("script", ["train.py", "train_ddp.py"])
def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(
    script: str, options, tmp_path
) -> None:
    run, folder = tmp_path / "run", slow(tmp_path / "s", script, 0.5)
    options = [*options, "checkpoint.every_steps=1"]
    processes, _ = fork(script, run, *options, folder=folder)
    wait_for_step(run, 1)
    line = refused(run, *options, "resume=auto")
    assert line.startswith(f"output_dir={run} belongs to a run that is still going (process ")
    for process in processes:
        send(process, signal.SIGKILL)
    join(processes)
    train("train.py", run, *options, "resume=auto", "max_steps=6")
    assert checkpoint_of(run)["step"] >= 6


def claim_for(seconds: float, folder: Path) -> None:
    claim(make_config(), folder)
    (folder / "is_claimed").touch()
    time.sleep(seconds)


def test_a_run_that_torchrun_restarts_waits_for_the_end_of_the_one_before(
    tmp_path, monkeypatch, caplog
) -> None:
    other = FORKSERVER.Process(target=claim_for, args=(2, tmp_path))
    other.start()
    wait_for((tmp_path / "is_claimed").exists, "the other run")
    again = make_config("resume=auto")
    with pytest.raises(ValueError, match="belongs to a run that is still going"):
        claim(again, tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    claim(again, tmp_path)
    assert "waits up to 120 s for the end of process" in caplog.text
    other.join()


def test_another_optimizer_is_refused(copy, options) -> None:
    files = [copy / "config.yaml", copy / "run.json", copy / "summary.json"]
    before = [path.read_text() for path in files]
    line = refused(copy, *options, "resume=auto", "epochs=3", "optimizer=sgd")
    assert "was made with other settings (optimizer.name: adamw then, sgd now)" in line
    assert [path.read_text() for path in files] == before


def test_other_inputs_are_refused_unless_they_are_meant(copy, options) -> None:
    other = [*options, "resume=auto", "epochs=3", "data.mean=[0.5,0.5,0.5]"]
    line = refused(copy, *other)
    assert (
        "was made with other inputs (data.mean: [0.485, 0.456, 0.406] then, [0.5, 0.5, 0.5] now)"
        in line
    )
    text = train("train.py", copy, *other, "checkpoint.fresh_epoch=true")
    assert "settings are other ones from here on: data.mean: [0.485, 0.456, 0.406] then" in text


def test_other_rates_are_listed_and_followed(copy, finished, options, tmp_path) -> None:
    other = ["optimizer.lr=0.001", "optimizer.weight_decay=0.5", "global_batch_size=16"]
    text = train("train.py", copy, *options, "resume=auto", "epochs=3", *other)
    line = next(line for line in text.splitlines() if line.startswith("settings are other ones"))
    assert "optimizer.lr: 0.003 then, 0.001 now" in line
    assert "optimizer.weight_decay: 0.01 then, 0.5 now" in line
    assert "global_batch_size: 8 then, 16 now" in line
    [group] = checkpoint_of(copy)["optimizer"]["param_groups"]
    assert (group["weight_decay"], group["initial_lr"]) == (0.5, 0.001)
    rates = [rate for _, rate in scalars_of(copy, "train/lr")][-4:]  # the last epoch, at 16 a step
    assert 0 < max(rates) < 0.001


def test_a_file_of_weights_is_no_checkpoint(finished, options, tmp_path) -> None:
    published = finished / "checkpoints" / "model.safetensors"
    plain, other = tmp_path / "plain.pt", tmp_path / "other.txt"
    torch.save(checkpoint_of(finished)["model"], plain)
    other.write_text("hello")
    for path, what in [
        (published, "holds weights alone, without optimizer and position"),
        (plain, "holds weights alone, without optimizer and position"),
        (other, "is no checkpoint of a run"),
    ]:
        line = refused(tmp_path / "run", *options, f"resume={path}")
        assert line == (
            f"resume={path} {what}; give a run's folder, one of its checkpoints/step-*.pt, or auto"
        )


def test_a_run_that_never_saved_starts_anew_without_its_old_events(options, tmp_path) -> None:
    run = tmp_path / "run"
    processes, _ = fork("train.py", run, *options, folder=slow(tmp_path / "s", "train.py", 1.0))
    wait_for(lambda: list(run.glob("events.*")), "events")
    send(processes[0], signal.SIGKILL)
    join(processes)
    train("train.py", run, *options, "resume=auto")
    assert len(list(run.glob("events.*"))) == 1


def test_the_same_settings_go_on_with_the_same_bits(finished, options, tmp_path) -> None:
    run = tmp_path / "run"
    train("train.py", run, *options, "max_steps=5")
    text = train("train.py", run, *options, "resume=auto")
    assert "settings are other ones" not in text
    assert_same_state(run, finished)
