"""Checkpoints: damaged, killed by seed while they are written, in shards, on a full disk."""

import json
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from runtime.checkpoint import CheckpointWriter
from runtime.checkpoint_files import MANIFEST, STATE, fingerprint
from tests.faults import NUM_STEPS
from tests.helpers import has_ranks, make_config, refused
from tests.processes import fork, join, train, wait_for
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
from tests.rows import rows


def flip_a_bit(folder: Path, name: str = STATE) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 0x10
    (folder / name).write_bytes(content)


def lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def write_manifest(folder: Path, files: dict[str, Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"files": files}))


def files_in(folder: Path) -> dict[str, Any]:
    """What the manifest of a folder should say."""
    return {path.name: fingerprint(path) for path in folder.glob("*.pt")}


def name_files_elsewhere(folder: Path) -> None:
    write_manifest(folder, {f"../../{folder.name}/{STATE}": files_in(folder)[STATE]})


def hold_code(folder: Path) -> None:
    """A pickled module in place of a tensor, and a manifest of that."""
    state = torch.load(folder / STATE, weights_only=True)
    torch.save(state | {"model": nn.Linear(2, 2)}, folder / STATE)
    write_manifest(folder, files_in(folder))


DAMAGES = [flip_a_bit, lose_the_manifest, name_files_elsewhere, hold_code]


def test_a_run_goes_on_from_the_checkpoint_before_damaged_ones(finished, options, tmp_path) -> None:
    """Those of steps 11 to 14 are damaged. That of step 10 was about to be replaced when its run
    was killed: renamed away, and the new one not yet to its name; a foreign file lies in it."""
    run, good = tmp_path / "run", step_folder(finished, 10)
    for step, damage in enumerate(DAMAGES, start=11):
        damage(shutil.copytree(good, step_folder(run, step)))
    dead = shutil.copytree(good, run / "checkpoints" / ".step-00000017.tmp")
    old = shutil.copytree(good, run / "checkpoints" / ".step-00000010.old")
    (old / "notes.txt").write_text("a file that somebody has put there does no harm")
    text = train("train.py", run, *options, "resume=auto", "checkpoint.keep=1")
    for step in range(11, 15):
        assert f"{step_folder(run, step)} is damaged" in text
    assert f"resumed from {old}: step 10" in text
    assert "weights_only=False" not in text  # as PyTorch advises
    assert_same_state(run, finished)
    assert steps_saved(run) == [16]
    assert not dead.exists()
    flip_a_bit(step_folder(run, 16))
    error = train("train.py", run, *options, "resume=auto", code=2)
    assert "resume=auto: there is no checkpoint that can be read (1 found)" in error


def test_a_full_disk_leaves_the_checkpoint_before_intact(options, tmp_path) -> None:
    """Here a limit to the size of files, which PyTorch meets in the middle of one, too."""
    run = tmp_path / "run"
    lines = ["if step == 6:", "    import resource", "    run.writer.wait()"]
    lines += ["    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"]
    text = train("train.py", run, *options, "checkpoint.every_steps=5", loop=lines, code=1)
    assert "step-00000008 could not be written" in text
    assert "File too large); earlier checkpoints are untouched" in text
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000005"]
    assert checkpoint_of(run)["step"] == 5


@pytest.mark.parametrize("script", ["train.py", *rows("train_fsdp.py")])
def test_training_goes_on_while_a_checkpoint_is_written_or_cannot_be(
    script: str, options, tmp_path
) -> None:
    """The write of step 4 ends once step 8 has begun, and has the values of step 4. In the first
    write of step 8, the disk of the last rank is full."""
    run, four = tmp_path / "run", tmp_path / "four"
    file = "shard" if "fsdp" in script else "state"
    loop = [
        "if step == 1:",
        "    counted, real = [], torch.save",
        "    def save(content, path, **options):",
        f"        if os.path.basename(getattr(path, 'name', '')).startswith('{file}'):",
        "            counted.append(run.step_number)",
        "            while counted == [4] and run.step_number < 8: time.sleep(0.01)",
        "            if len(counted) == 2 and rank == run.group.world_size - 1:",
        "                raise OSError(28, 'No space left on device')",
        "        return real(content, path, **options)",
        "    torch.save = save",
    ]
    more = [*options, "checkpoint.every_steps=4", "checkpoint.keep=9", "checkpoint.on_error=warn"]
    text = train(script, run, *more, loop=loop)
    [line] = [line for line in text.splitlines() if "could not be written" in line]
    for words in ("step-00000008", f"rank {int(has_ranks(script))}", "No space left"):
        assert words in line
    assert steps_saved(run) == [4, 8, 12, 16]  # step 8 once more, with its validation
    assert not list(run.glob("checkpoints/.*"))
    train(script, four, *options, "max_steps=4")
    assert_same(checkpoint_of(run, 4)["model"], checkpoint_of(four)["model"])
    for state in ("exp_avg", "exp_avg_sq"):
        one, other = (checkpoint_of(x, 4)["optimizer"]["state"] for x in (run, four))
        assert_same([x[state] for x in one.values()], [x[state] for x in other.values()])


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


def test_steps_that_a_run_has_left_go_before_older_ones_and_the_best_one_stays(tmp_path) -> None:
    """It went on from an earlier step, as with a larger batch or before a damaged checkpoint. A run
    was killed while it published weights."""
    (tmp_path / "checkpoints" / ".model.safetensors.tmp").mkdir(parents=True)
    writer = CheckpointWriter(make_config("checkpoint.keep=2").checkpoint, tmp_path / "checkpoints")
    state = {"model": {"weight": torch.ones(2)}, "facts": {}}
    for step, is_best, kept in [
        *((5, False, [5]), (9, True, [5, 9]), (6, False, [5, 6]), (3, False, [3])),
        *((4, True, [3, 4]), (7, False, [4, 7]), (8, False, [4, 7, 8]), (9, True, [8, 9])),
    ]:
        writer.write(state | {"step": step}, is_best)
        writer.wait()
        assert steps_saved(tmp_path) == kept
        assert not list(tmp_path.glob("checkpoints/.*"))


@pytest.mark.parametrize(("script", "num_kills"), rows(("train.py", 6), ("train_fsdp.py", 3)))
def test_a_chain_of_runs_that_are_killed_while_they_save_ends_with_the_bits_of_one(
    script: str, num_kills: int, options, tmp_path
) -> None:
    """The first kill is of one of the ranks, which the others notice. A write takes 0.2 s, so that
    it is not over before the kill on a busy machine."""
    run, whole, random, num_inside = tmp_path / "run", tmp_path / "whole", Random(script), 0
    slow = ["os.fsync = lambda file: time.sleep(0.05)"]
    options = [*options, "resume=auto", "checkpoint.every_steps=1"]
    checkpoints = run / "checkpoints"

    def newest_begun() -> int:
        """The step of the newest write that has begun; 0: none has."""
        names = [path.name.strip(".") for path in checkpoints.glob("*step-*")]
        return max((int(name[5:13]) for name in names), default=0)

    def run_until_killed(is_of_one: bool) -> None:
        newest = newest_begun()
        processes, prints = fork(script, run, *options, loop=slow)
        wait_for(lambda: newest_begun() > newest, f"a write after that of step {newest}")
        time.sleep(random.uniform(0, 0.1))
        killed = processes[-1:] if is_of_one else processes
        for process in killed:
            process.kill()
        expected = [1] * (len(processes) - len(killed)) + [-9] * len(killed)
        assert join(processes) == expected, [path.read_text() for path in prints]

    for number in range(num_kills):
        run_until_killed(is_of_one=number == 0)
        num_inside += any(checkpoints.glob(".step-*.tmp"))
    assert newest_begun() < NUM_STEPS
    train(script, run, *options)
    train(script, whole, *options)
    assert_same_state(run, whole)
    assert not list(checkpoints.glob(".*"))
    assert num_inside >= 1


@pytest.mark.parametrize("sharded", rows("train_fsdp.py"))
def test_a_run_goes_on_with_any_script_on_any_number_of_ranks(sharded, options, tmp_path) -> None:
    """The optimizer's state is loaded as well, or weights would leave those of the whole run. A
    shard of step 7 is lost, one of step 6 has a flipped bit, and one of step 5 is code."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    # The newest checkpoint, which gets damaged, is not to be the best one, too.
    options = [*options, "checkpoint.every_steps=1", "checkpoint.keep=4", "checkpoint.best=false"]
    options += ["model.kwargs.batch_norm=false"]

    def go_on(script: str, last_step: int, num_ranks: int | None = None) -> str:
        more = [*options, "resume=auto", f"max_steps={last_step}"]
        return train(script, run, *more, num_ranks=num_ranks)

    go_on(sharded, 7)
    (step_folder(run, 7) / "shard-00000.pt").unlink()
    flip_a_bit(step_folder(run, 6), "shard-00001.pt")
    torch.save(nn.Linear(2, 2), step_folder(run, 5) / "shard-00001.pt")
    write_manifest(step_folder(run, 5), files_in(step_folder(run, 5)))
    with refused(str(step_folder(run, 5)), "more than tensors"):
        published(step_folder(run, 5))
    torch.save(nn.Linear(2, 2), step_folder(run, 4) / "shard-00007.pt")  # in no manifest
    printed = go_on(sharded, 9, num_ranks=1)
    for step in (5, 6, 7):
        assert f"step-{step:08d} is damaged or not a checkpoint" in printed
    assert "step-00000004: step 4" in printed
    go_on(sharded, 10, num_ranks=4)  # some ranks have no part of the smallest weights
    go_on("train_ddp.py", 12)
    go_on("train.py", 14)
    go_on(sharded, NUM_STEPS)
    assert_same(published(run), checkpoint_of(run)["model"])
    train("train.py", whole, *options)
    assert weights_differ_by(run, whole) < 1e-3
    losses = values_of(run, "train/loss"), values_of(whole, "train/loss")
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
