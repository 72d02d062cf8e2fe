"""Checkpoints in shards, written by all ranks while they train."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from models.pretrained import MANIFEST, fingerprint, read_state
from tests.faults import NUM_STEPS, script_with
from tests.helpers import refused
from tests.processes import run_to_end, train
from tests.results import (
    assert_same,
    assert_same_state,
    checkpoint_of,
    published,
    step_folder,
    steps_saved,
    values_of,
    weights_differ_by,
)

SCRIPT = "train_fsdp.py"


def script_that_writes(folder: Path, *lines: str) -> Path:
    """The script, whose ranks run these lines before they write shards for the `count`-th time."""
    return script_with(
        folder,
        SCRIPT,
        "if step == 1:",
        "    counted, real = [], torch.save",
        "    def save(content, path, **options):",
        "        if getattr(path, 'name', '').startswith('shard'):",
        "            counted.append(1)",
        "            count = len(counted)",
        *(f"            {line}" for line in lines),
        "        return real(content, path, **options)",
        "    torch.save = save",
    )


def test_training_goes_on_while_shards_are_written_or_cannot_be(options, tmp_path) -> None:
    """The write of step 4 ends once step 8 has begun. In the first write of step 8, the disk of a
    rank is full."""
    run = tmp_path / "run"
    folder = script_that_writes(
        tmp_path / "s",
        "before = run.step_number",
        "while count == 1 and run.step_number < 8: time.sleep(0.01)",
        f"is_there = os.path.exists({str(step_folder(run, 4))!r})",
        "assert count > 1 or (before < 8 and not is_there)",  # or there would be no step 4
        "if (rank, count) == (1, 2): raise OSError(28, 'No space left on device')",
        "hidden = [name for name in os.listdir(run.writer.folder) if name.startswith('.')]",
        "assert len(hidden) == 1",  # that of the failed write is gone
    )
    overrides = ["checkpoint.every_steps=4", "checkpoint.keep=9", "checkpoint.on_error=warn"]
    text = train(SCRIPT, run, *options, *overrides, folder=folder)
    [line] = [line for line in text.splitlines() if "could not be written" in line]
    assert all(words in line for words in ("step-00000008", "rank 1", "No space left"))
    assert steps_saved(run) == [4, 8, 12, 16]  # step 8 once more, with its validation
    assert not list(run.glob("checkpoints/.*"))


def test_a_write_in_which_a_rank_is_killed_leaves_nothing_for_ever(options, tmp_path) -> None:
    run = tmp_path / "run"
    overrides = [*options, "checkpoint.every_steps=2", "resume=auto"]
    folder = script_that_writes(tmp_path / "s", "if (rank, count) == (1, 2): os._exit(9)")
    codes, prints = run_to_end(SCRIPT, run, *overrides, folder=folder)
    assert codes == [1, 9], prints
    assert steps_saved(run) == [2]
    printed = train(SCRIPT, run, *overrides)
    assert "step-00000002: step 2" in printed
    assert not list(run.glob("checkpoints/.*"))
    train(SCRIPT, tmp_path / "whole", *options)
    assert checkpoint_of(run)["step"] == NUM_STEPS
    assert_same_state(run, tmp_path / "whole")


def test_a_run_goes_on_with_any_script_on_any_number_of_ranks(options, tmp_path) -> None:
    """The optimizer's state is loaded as well, or weights would leave those of the whole run. One
    shard is lost, and one has flipped bytes."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    # The newest checkpoint, which gets damaged, is not to be the best one, too.
    options = [*options, "checkpoint.every_steps=2", "checkpoint.keep=3", "checkpoint.best=false"]
    options += ["model.kwargs.batch_norm=false"]

    def go_on(script: str, last_step: int, num_ranks: int | None = None) -> str:
        more = [*options, "resume=auto", f"max_steps={last_step}"]
        return train(script, run, *more, num_ranks=num_ranks)

    go_on(SCRIPT, 7)
    (step_folder(run, 7) / "shard-00000.pt").unlink()
    damaged = step_folder(run, 6) / "shard-00001.pt"
    damaged.write_bytes(damaged.read_bytes()[::-1])
    printed = go_on(SCRIPT, 9, num_ranks=1)
    assert "step-00000006 is damaged or not a checkpoint (shard-00001.pt is not" in printed
    assert "step-00000004: step 4" in printed
    go_on(SCRIPT, 10, num_ranks=4)  # some ranks have no part of the smallest weights
    go_on("train_ddp.py", 12)
    go_on(SCRIPT, 13)
    go_on("train.py", 14)
    go_on(SCRIPT, NUM_STEPS)
    train("train.py", whole, *options)
    assert weights_differ_by(run, whole) < 1e-3
    losses = values_of(run, "train/loss"), values_of(whole, "train/loss")
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_what_uses_a_trained_model_reads_the_shards_of_its_best_checkpoint(
    options, tmp_path
) -> None:
    run = tmp_path / "run"
    train(SCRIPT, run, *options)
    assert not (run / "checkpoints" / "model.safetensors").exists()
    best = checkpoint_of(run, best=True)["model"]
    assert_same(published(run), best)
    started = tmp_path / "started"
    rate = ["optimizer.lr=1e-30", "max_steps=1", f"model.weights={run}"]
    train("train.py", started, *options, *rate)
    after = checkpoint_of(started)["model"]
    learning = [name for name in best if "running" not in name and "tracked" not in name]
    assert_same([after[name] for name in learning], [best[name] for name in learning])


def test_shards_with_code_or_of_other_runs_are_not_read(options, tmp_path) -> None:
    run = tmp_path / "run"
    train(SCRIPT, run, *options, "max_steps=2")
    folder = step_folder(run, 2)
    torch.save(nn.Linear(2, 2), folder / "shard-00007.pt")  # in no manifest
    read_state(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    shutil.copy(folder / "shard-00007.pt", folder / "shard-00001.pt")
    manifest["files"]["shard-00001.pt"] = fingerprint(folder / "shard-00001.pt")
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with refused(str(folder), "more than tensors"):
        published(run)
    assert f"{folder} is damaged" in train(SCRIPT, run, *options, "resume=auto", code=2)
