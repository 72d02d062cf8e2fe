"""kill -9 at moments drawn by a seed, while checkpoints are written."""

import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random

import pytest
import torch

from models.pretrained import newest_first
from runtime.checkpoint import CheckpointWriter, read_checkpoint
from tests.helpers import make_config
from tests.processes import LIMIT_S, fork, join, start_process, train
from tests.results import assert_same_state
from tests.rows import rows

NUM_WRITES = 150


def wait_for_newer(folder: Path, step: int, process: ForkServerProcess) -> None:
    """Until a write of this step or a later one has begun, to half a millisecond, or it ends."""
    end = time.monotonic() + LIMIT_S
    while newest_begun(folder) < step and process.exitcode is None:
        assert time.monotonic() < end
        time.sleep(0.0005)


def newest_begun(folder: Path) -> int:
    """The step of the newest write that has begun; 0: none has."""
    steps = [int(path.name.strip(".")[5:13]) for path in folder.glob("*step-*")]
    return max(steps, default=0)


def after(step: int, weight: torch.Tensor) -> torch.Tensor:
    return (weight + step).sin()


def write_steps(folder: Path) -> None:
    """Train a weight from the last checkpoint on, and save in each step; some are the best ones."""
    saved = read_checkpoint("auto", folder) or {"step": 0, "model": {"weight": torch.ones(1000)}}
    writer, weight = CheckpointWriter(make_config().checkpoint, folder), saved["model"]["weight"]
    for step in range(saved["step"] + 1, NUM_WRITES + 1):
        weight = after(step, weight)
        writer.wait()
        state = {"step": step, "model": {"weight": weight}, "facts": {}}
        writer.write(state | {"progress": {}}, is_best=step % 7 == 0)
        if step % 2:  # as a validation saves a step once more
            writer.wait()
            writer.write(state | {"progress": {}}, is_best=step % 7 == 0)
    writer.wait()


def test_writes_that_are_killed_anywhere_leave_a_checkpoint_to_go_on_from(tmp_path) -> None:
    folder, random, num_kills, num_inside, last = tmp_path / "checkpoints", Random(0), 0, 0, 0
    folder.mkdir()
    (folder / ".1-model.safetensors").touch()  # of a process that was killed
    while True:
        process = start_process(write_steps, folder)
        wait_for_newer(folder, newest_begun(folder) + 1, process)
        time.sleep(random.uniform(0, 0.03))
        process.kill()
        if join([process]) == [0]:
            break
        num_kills += 1
        num_inside += any(folder.glob(".step-*.tmp"))
        saved = read_checkpoint("auto", folder)
        assert saved is not None
        assert saved["step"] >= last  # nothing that was whole is lost
        last = saved["step"]
    weight = torch.ones(1000)
    for step in range(1, NUM_WRITES + 1):
        weight = after(step, weight)
    saved = read_checkpoint("auto", folder)
    assert saved is not None
    assert saved["model"]["weight"].equal(weight)
    assert [path.name[-3:] for path in newest_first(folder)] == ["150", "149", "147"]
    assert not list(folder.glob(".*"))
    assert num_kills >= 5
    assert num_inside >= 2


@pytest.mark.parametrize(
    ("script", "num_kills"), [("train.py", 5), *rows(("train_ddp.py", 2), ("train_fsdp.py", 3))]
)
def test_a_chain_of_runs_that_are_killed_while_they_save_ends_with_the_bits_of_one(
    script: str, num_kills: int, options, tmp_path
) -> None:
    run, whole, random, num_inside = tmp_path / "run", tmp_path / "whole", Random(script), 0
    options = [*options, "resume=auto", "checkpoint.every_steps=1"]
    checkpoints = run / "checkpoints"

    for _ in range(num_kills):
        goal = newest_begun(checkpoints) + random.randint(2, 3)
        processes, prints = fork(script, run, *options)
        wait_for_newer(checkpoints, goal, processes[0])
        time.sleep(random.uniform(0, 0.003))
        for process in processes:
            process.kill()
        assert set(join(processes)) == {-9}, [path.read_text() for path in prints]
        num_inside += any(checkpoints.glob(".step-*.tmp"))
    train(script, run, *options)
    train(script, whole, *options)
    assert_same_state(run, whole)
    assert not list(checkpoints.glob(".*"))
    assert num_inside >= 1
