"""Checkpoints in shards, written by all ranks while they train; precision of gathered weights."""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runtime.amp import gather_in
from runtime.distributed import shard
from runtime.run_dir import lock_run_dir
from runtime.whole import make_whole
from tests.faults import (
    NUM_STEPS,
    assert_same_state,
    flip_byte,
    script_with,
    step_file,
    steps_saved,
)
from tests.helpers import answers_to, checkpoint_of, run_to_end, train, values_of, weights_differ_by

SCRIPT = "train_fsdp.py"


def script_that_writes(folder: Path, *lines: str) -> Path:
    """The script, whose ranks run these lines before they write shards for the `count`-th time."""
    return script_with(
        folder,
        SCRIPT,
        "if step == 1 and 'real' not in globals():",
        "    from torch.distributed.checkpoint import FileSystemWriter",
        "    counted, real = [], FileSystemWriter.write_data",
        "    globals()['real'] = real",
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


FULL = "raise OSError(28, 'No space left on device')"


def test_training_goes_on_while_shards_are_written_and_if_one_rank_cannot(
    options, tmp_path
) -> None:
    """The write of step 4 ends once step 8 has begun; the file that names its shards follows. In
    the first write of step 8, the disk of a rank is full."""
    run, seen = tmp_path / "run", tmp_path / "seen.json"
    named = run / "checkpoints" / "step-00000004.pt"
    folder = script_that_writes(
        tmp_path / "s",
        "import json",
        "end = time.monotonic() + 120",
        "before = run.step_number",
        "while count == 1 and run.step_number < 7 and time.monotonic() < end: time.sleep(0.01)",
        f"facts = [before, run.step_number, os.path.exists({str(named)!r})]",
        f"count > 1 or rank or open({str(seen)!r}, 'w').write(json.dumps(facts))",
        f"if (rank, count) == (1, 2): {FULL}",
    )
    overrides = ["checkpoint.every_steps=4", "checkpoint.keep=9", "checkpoint.on_error=warn"]
    text = train(SCRIPT, run, *options, *overrides, folder=folder)
    before, after, is_named = json.loads(seen.read_text())
    assert before < after == 7
    assert not is_named
    assert "step-00000008.pt could not be written" in text
    assert steps_saved(run) == [4, 8, 12, 16]  # step 8 once more, with its validation
    assert_all_shards_are_named(run)


def test_a_rank_that_cannot_write_or_is_killed_meanwhile_ends_all_and_no_file_names_its_shards(
    options, tmp_path
) -> None:
    run, shards = tmp_path / "run", tmp_path / "run" / "checkpoints"
    overrides = [*options, "checkpoint.every_steps=2", "resume=auto"]
    folder = script_that_writes(tmp_path / "full", f"if rank == 1: {FULL}")
    codes, [text, _] = run_to_end(SCRIPT, run, *overrides, folder=folder)
    assert codes == [1, 1], text
    assert "step-00000002.pt could not be written" in text
    assert "No space left on device" in text
    assert "on rank 1" in text
    assert steps_saved(run) == []

    folder = script_that_writes(tmp_path / "killed", "if (rank, count) == (1, 2): os._exit(9)")
    codes, prints = run_to_end(SCRIPT, run, *overrides, folder=folder)
    assert codes == [1, 9], prints
    assert steps_saved(run) == [2]
    assert len(list(shards.glob("shards-*"))) == 2

    printed = train(SCRIPT, run, *overrides)
    assert "step-00000002.pt: step 2" in printed
    assert_all_shards_are_named(run)
    train(SCRIPT, tmp_path / "whole", *options)
    assert checkpoint_of(run)["step"] == NUM_STEPS
    assert_same_state(run, tmp_path / "whole")

    lock_run_dir(run)  # as a run does that is still going
    [(code, text)] = answers_to([["-m", "runtime.whole", f"run={run}"]], tmp_path)
    assert code == 2, text
    assert str(run) in text
    assert_all_shards_are_named(run)


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

    go_on("train.py", 3, num_ranks=1)
    assert "step-00000003.pt: step 3" in go_on(SCRIPT, 7)
    assert_all_shards_are_named(run)
    newest = run / "checkpoints" / torch.load(step_file(run, 7))["shards"]["folder"]
    damaged = max(newest.iterdir())
    flip_byte(damaged)
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


def test_weights_are_gathered_in_autocasts_dtype_except_those_beside_batchnorm() -> None:
    """Autocast would keep a copy of all gathered weights until backward has used them."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, _: seen.update({name: next(module.parameters()).dtype})

    norm = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
    layers = {"norm": norm, "first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    model = nn.Sequential(OrderedDict(layers))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        gather_in(model, torch.bfloat16)
        shard(model, torch.device("cpu"))
        for name, child in model.named_children():
            child.register_forward_pre_hook(note(name))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.rand(4, 1, 3, 3)).float().square().mean()
        loss.backward()
    finally:
        dist.destroy_process_group()
    low, full = torch.bfloat16, torch.float32
    assert seen == {"norm": full, "first": low, "second": low}
    assert all(p.grad is not None and p.grad.dtype == p.dtype == full for p in model.parameters())
