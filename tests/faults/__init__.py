"""Tests of faults; runs that can be hit, scripts with a fault, and comparisons of runs."""

import re
from pathlib import Path
from typing import Any

import torch

from tests.helpers import LIMIT_S, checkpoint_of, folder_with, wait_for

NUM_TRAIN = 64
NUM_STEPS = 16

SAVED = ("model", "optimizer", "scheduler", "scaler", "ema", "loader", "guard", "rng")
"""All that decides how a run goes on; the rest of a checkpoint tells what was."""

LOOP = re.compile(r"^ {8}for inputs, targets in run\.batches\(.*\):\n", re.MULTILINE)


def script_with(folder: Path, script: str, *lines: str) -> Path:
    """A folder like the repository's, with these lines put in at the top of the training loop.

    `step` counts the steps from 1 there, and `rank` is the number of the process.
    """
    path = folder_with(folder, script) / script
    added = ["step, rank = run.step_number + 1, run.group.rank", *lines]
    indented = "".join(f"            {line}\n" for line in added)
    text, count = LOOP.subn(lambda loop: loop[0] + indented, path.read_text())
    assert count == 1
    path.write_text("import os\nimport time\n" + text)
    return folder


def hit(mark: Path, step: int, rank: int, action: str) -> list[str]:
    """Lines for `script_with()` that do something in a step of a rank, but not after a resume."""
    return [
        f"if (step, rank) == ({step}, {rank}) and not os.path.exists({str(mark)!r}):",
        f"    open({str(mark)!r}, 'x').close()",
        f"    {action}",
    ]


def steps_saved(output_dir: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (output_dir / "checkpoints").glob("step-*.pt"))


def step_file(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.pt"


def flip_byte(path: Path) -> None:
    """Change a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def wait_for_step(output_dir: Path, step: int, timeout: float = LIMIT_S) -> None:
    """Until a checkpoint of this step or a later one is there."""
    wait_for(lambda: any(s >= step for s in steps_saved(output_dir)), f"step {step}", timeout)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal to the last bit, all tensors in them included."""
    assert type(one) is type(other), where
    if isinstance(one, list | tuple):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def assert_same_state(one: Path, other: Path) -> None:
    """The newest checkpoints of two runs are equal in all that decides how a run goes on."""
    first, second = checkpoint_of(one), checkpoint_of(other)
    assert first["step"] == second["step"]
    for name in SAVED:
        assert_same(first.get(name), second.get(name), name)
