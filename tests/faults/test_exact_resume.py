"""A run that was stopped and resumed ends with the same bits as one that was not."""

from pathlib import Path

import pytest

from tests.faults.helpers import NUM_STEPS, assert_same_state
from tests.helpers import ENVIRONMENT, checkpoint_of, scalars_of, start, train

# Overflows at first: those steps are skipped.
FLOAT16 = ["amp.dtype=float16", "amp.init_scale=1e8"]
OPTIONS = {
    "train_ddp_amp.py": FLOAT16,
    "train_accumulate.py": ["accumulate_steps=4"],
    "train_ema.py": ["ema.decay=0.5"],
}


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """Output folder of an uninterrupted run, each made when first asked for."""
    folders: dict[tuple[str, ...], Path] = {}

    def folder_of(script: str, *overrides: str) -> Path:
        key = (script, *overrides)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("whole") / "run"
            train(script, folders[key], *options, *overrides)
        return folders[key]

    return folder_of


@pytest.mark.parametrize(
    ("script", "loader", "num_workers"),
    [
        ("train.py", "pytorch", 2),
        ("train_ddp_amp.py", "dali", 0),
        ("train_accumulate.py", "pytorch", 0),
        ("train_ema.py", "dali", 0),
        ("train_fsdp.py", "pytorch", 0),
    ],
)
def test_a_run_stopped_twice_in_mid_epoch_ends_with_the_same_bits(
    script: str, loader: str, num_workers: int, whole, options, tmp_path
) -> None:
    """The uninterrupted run has no worker processes: they change nothing either."""
    overrides = [f"loader={loader}", *OPTIONS.get(script, [])]
    stopped = tmp_path / "run"
    for last_step in (3, 13, NUM_STEPS):
        train(
            script,
            stopped,
            *options,
            *overrides,
            f"loader.num_workers={num_workers}",
            f"max_steps={last_step}",
            "resume=auto",
        )
        assert checkpoint_of(stopped)["step"] == last_step
    assert_same_state(stopped, whole(script, *overrides))
    losses = scalars_of(whole(script, *overrides), "train/loss")
    assert scalars_of(stopped, "train/loss") == losses
    assert len(losses) == NUM_STEPS
    if "amp" in script:
        assert checkpoint_of(stopped)["scaler"]["scale"] < 1e8  # it did overflow
    log = (stopped / "train.log").read_text()
    assert log.count("resumed from") == 2  # one log over all attempts


def test_a_resumed_run_computes_with_as_many_threads_as_before(
    options, monkeypatch, tmp_path
) -> None:
    """Of Pythons that really start, since torch asks for their number only once."""
    monkeypatch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", "2")
    middle = tmp_path / "whole" / "checkpoints" / "step-00000005.pt"
    common = [*options, "model.kwargs.width=32", "max_steps=10"]
    saved = ["checkpoint.every_steps=5", "checkpoint.keep=9"]
    for name, more in {"whole": saved, "run": [f"resume={middle}"]}.items():
        run = start("train.py", *common, f"output_dir={tmp_path / name}", *more)
        assert run.returncode == 0, run.stderr
    assert_same_state(tmp_path / "run", tmp_path / "whole")
