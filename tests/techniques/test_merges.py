"""Merges of FSDP, accumulation and mixed precision."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.faults import assert_same
from tests.helpers import checkpoint_of, folder_with, replace, run_all, summary_of, train
from tests.techniques import FLOAT16, PLAIN

pytestmark = pytest.mark.slow


@contextmanager
def count_collectives(script: str) -> Iterator[None]:
    """Print at last how often the script called each collective, as JSON."""
    with profile(activities=[ProfilerActivity.CPU]) as calls:
        yield
    counts = {e.key: e.count for e in calls.key_averages() if e.key.startswith("c10d::")}
    print(json.dumps(counts))


@pytest.mark.parametrize("script", ["train_ddp_accumulate.py", "train_fsdp_accumulate.py"])
def test_gradients_travel_once_in_each_optimizer_step(script: str, data, tmp_path) -> None:
    folder, options = folder_with(tmp_path / "s", script), [*data, *PLAIN, "max_steps=2"]
    commands = [
        [script, *options, f"accumulate_steps={n}", f"output_dir={tmp_path / str(n)}"]
        for n in (1, 4)
    ]
    prints = run_all(commands, tmp_path, 2, folder, count_collectives)
    one, four = (json.loads(printed.splitlines()[-1]) for printed in prints)
    gradients = "c10d::_reduce_scatter_base_" if "fsdp" in script else "c10d::allreduce_"
    assert one[gradients] >= 2
    for name in (gradients, "c10d::allreduce_"):
        assert four[name] == one[name]


def test_an_overflow_in_one_ranks_part_skips_the_step_on_all(data, tmp_path) -> None:
    """Of the gradients' parts, only one of rank 1 is infinite in step 3."""
    script, run, indent = "train_fsdp_amp.py", tmp_path / "run", " " * 12
    overflow = f"{indent}if run.step_number == 2 and group.rank == 1:\n"
    overflow += f"{indent}    next(model.parameters()).grad.to_local().view(-1)[0] = float('inf')\n"
    folder = folder_with(tmp_path / "s", script)
    replace(folder / script, f"{indent}# clip\n", f"{overflow}{indent}# clip\n")
    options = [*data, *PLAIN, FLOAT16, "amp.init_scale=256", "max_steps=4"]
    train(script, run, *options, "checkpoint.every_steps=1", "checkpoint.keep=9", folder=folder)
    two, three, four = (checkpoint_of(run, f"step-{step:08d}.pt") for step in (2, 3, 4))
    assert [state["scaler"]["scale"] for state in (two, three, four)] == [256, 128, 128]
    assert_same(two["model"], three["model"])
    assert_same(two["optimizer"]["state"], three["optimizer"]["state"])
    for name, weights in four["model"].items():
        assert weights.isfinite().all()
        assert not weights.equal(three["model"][name])
    assert summary_of(run)["bad_steps"] == 0
