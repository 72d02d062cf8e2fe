"""Checkpoints in shards, written by all ranks while they train; precision of gathered weights."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conf.files import checksum
from runtime.fsdp import shard
from runtime.whole import make_whole
from tests.faults import NUM_STEPS, assert_same_state, script_with, step_file, steps_saved
from tests.helpers import checkpoint_of, refused, run_to_end, train, values_of, weights_differ_by

SCRIPT = "train_fsdp.py"


def script_that_writes(folder: Path, *lines: str) -> Path:
    """The script, whose ranks run these lines before they write shards for the `count`-th time."""
    return script_with(
        folder,
        SCRIPT,
        "if step == 1:",
        "    from torch.distributed.checkpoint import FileSystemWriter",
        "    counted, real = [], FileSystemWriter.write_data",
        "    def write_data(*arguments):",
        "        counted.append(1)",
        "        count = len(counted)",
        *(f"        {line}" for line in lines),
        "        return real(*arguments)",
        "    FileSystemWriter.write_data = write_data",
    )


def assert_all_shards_are_named(run: Path) -> None:
    states = [torch.load(path, weights_only=True) for path in (run / "checkpoints").glob("*.pt")]
    named = {state["shards"]["folder"] for state in states if "shards" in state}
    assert {path.name for path in (run / "checkpoints").glob("shards-*")} == named


def test_training_goes_on_while_shards_are_written_or_cannot_be(options, tmp_path) -> None:
    """The write of step 4 ends once step 8 has begun; the file that names its shards follows. In
    the first write of step 8, the disk of a rank is full."""
    run = tmp_path / "run"
    folder = script_that_writes(
        tmp_path / "s",
        "before = run.step_number",
        "while count == 1 and run.step_number < 7: time.sleep(0.01)",
        f"is_named = os.path.exists({str(step_file(run, 4))!r})",
        "assert count > 1 or (before < 7 and not is_named)",  # or there would be no step 4
        "if (rank, count) == (1, 2): raise OSError(28, 'No space left on device')",
        "folders = [name for name in os.listdir(run.writer.folder) if name.startswith('shards')]",
        "assert count != 3 or len(folders) == 2",  # those of the failed write are gone
    )
    overrides = ["checkpoint.every_steps=4", "checkpoint.keep=9", "checkpoint.on_error=warn"]
    text = train(SCRIPT, run, *options, *overrides, folder=folder)
    [line] = [line for line in text.splitlines() if "could not be written" in line]
    assert all(words in line for words in ("step-00000008.pt", "on rank 1", "No space left"))
    assert steps_saved(run) == [4, 8, 12, 16]  # step 8 once more, with its validation
    assert_all_shards_are_named(run)


def test_shards_of_a_rank_that_is_killed_are_named_by_no_file(options, tmp_path) -> None:
    run = tmp_path / "run"
    overrides = [*options, "checkpoint.every_steps=2", "resume=auto"]
    folder = script_that_writes(tmp_path / "s", "if (rank, count) == (1, 2): os._exit(9)")
    codes, prints = run_to_end(SCRIPT, run, *overrides, folder=folder)
    assert codes == [1, 9], prints
    assert steps_saved(run) == [2]
    printed = train(SCRIPT, run, *overrides)
    assert "step-00000002.pt: step 2" in printed
    assert_all_shards_are_named(run)
    train(SCRIPT, tmp_path / "whole", *options)
    assert checkpoint_of(run)["step"] == NUM_STEPS
    assert_same_state(run, tmp_path / "whole")


def test_a_run_goes_on_sharded_and_whole_in_turn_on_any_number_of_ranks(options, tmp_path) -> None:
    """The optimizer's state is loaded as well, or weights would leave those of the whole run."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    # The newest checkpoint, which gets damaged, is not to be the best one, too.
    options = [*options, "checkpoint.every_steps=2", "checkpoint.best=false"]
    options += ["model.kwargs.batch_norm=false"]

    def go_on(script: str, last_step: int, *, num_ranks: int = 2, code: int = 0) -> str:
        more = [*options, "resume=auto", f"max_steps={last_step}"]
        codes, prints = run_to_end(script, run, *more, num_ranks=num_ranks)
        assert codes == [code] * num_ranks, prints
        return prints[0]

    go_on(SCRIPT, 7)
    assert_all_shards_are_named(run)
    newest = run / "checkpoints" / torch.load(step_file(run, 7))["shards"]["folder"]
    damaged = max(newest.iterdir())
    damaged.write_bytes(damaged.read_bytes()[::-1])
    printed = go_on(SCRIPT, 9, num_ranks=1)
    assert f"wrong checksum of {newest.name}/{damaged.name}" in printed
    assert "step-00000006.pt: step 6" in printed
    assert "python -m runtime.whole" in go_on("train_ddp.py", 11, code=2)
    assert make_whole(run)
    assert not list(run.glob("checkpoints/shards-*"))
    go_on("train_ddp.py", 11)
    go_on(SCRIPT, NUM_STEPS)
    assert_all_shards_are_named(run)
    train("train.py", whole, *options)
    assert weights_differ_by(run, whole) < 1e-3
    losses = values_of(run, "train/loss"), values_of(whole, "train/loss")
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)

    train("train.py", run, *options, "max_steps=1", "overwrite=true")
    assert not list(run.glob("checkpoints/shards-*"))


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_shards_that_run_code_or_lie_elsewhere_are_refused(options, tmp_path) -> None:
    run, made = tmp_path / "run", tmp_path / "made"
    train(SCRIPT, run, *options, "max_steps=2")
    shutil.copytree(run, other := tmp_path / "other")
    [file] = other.glob("checkpoints/step-*.pt")
    state = torch.load(file, weights_only=True)
    folder, files = state["shards"]["folder"], state["shards"]["files"]
    state["shards"]["folder"] = f"../../run/checkpoints/{folder}"
    torch.save(state, file)
    (other / "checkpoints" / "best.pt").unlink()
    with refused(f"{folder} is not in the folder"):
        make_whole(other)

    table = run / "checkpoints" / folder / ".metadata"
    table.write_bytes(pickle.dumps(Harmful(made)))
    [file] = run.glob("checkpoints/step-*.pt")
    state["shards"] = {"folder": folder, "files": files | {".metadata": checksum(table)}}
    torch.save(state, file)
    (run / "checkpoints" / "best.pt").unlink()
    with refused(str(table), "touch"):
        make_whole(run)
    codes, [text, _] = run_to_end(SCRIPT, run, *options, "resume=auto")
    assert codes == [2, 2], text
    assert str(table) in text
    assert not made.exists()


def test_weights_are_gathered_in_autocasts_dtype_except_those_beside_batchnorm() -> None:
    """Autocast would keep a copy of all gathered weights until backward has used them."""
    norm = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
    model, seen = nn.Sequential(norm, nn.Linear(8, 8), nn.Linear(8, 8)), []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard(model, torch.device("cpu"), torch.bfloat16)
        for block in model:
            block.register_forward_pre_hook(lambda x, _: seen.append(next(x.parameters()).dtype))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.rand(4, 1, 3, 3)).float().square().mean()
        loss.backward()
    finally:
        dist.destroy_process_group()
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype == torch.float32
