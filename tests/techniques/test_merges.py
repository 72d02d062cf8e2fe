"""Merges of FSDP, accumulation and mixed precision."""

from collections import Counter

import pytest

from tests.faults import assert_same
from tests.helpers import checkpoint_of, folder_with, replace, trace_of, train
from tests.techniques import FLOAT16, PLAIN

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", ["train_ddp_accumulate.py", "train_fsdp_accumulate.py"])
def test_gradients_travel_once_in_each_optimizer_step(script: str, data, tmp_path) -> None:
    folder, options = folder_with(tmp_path / "s", script), [*data, *PLAIN, "max_steps=3"]
    collectives = []
    for number in (1, 4):
        run, parts = tmp_path / f"{number}", f"accumulate_steps={number}"
        train(script, run, *options, parts, "profile.steps=[1,2]", folder=folder)
        collectives.append(Counter(trace_of(run)))
    one, four = collectives
    gradients = "c10d::_reduce_scatter_base_" if "fsdp" in script else "c10d::allreduce_"
    assert one[gradients] >= 2
    for name in (gradients, "c10d::allreduce_"):
        assert four[name] == one[name]


def test_an_overflow_in_one_ranks_part_skips_the_step_on_all(data, tmp_path) -> None:
    """Of the gradients' parts, only one of rank 1 is infinite in step 3."""
    script, run, indent = "train_fsdp_amp.py", tmp_path / "run", " " * 12
    overflow = f"{indent}if run.step_number == 3 and group.rank == 1:\n"
    overflow += f"{indent}    next(model.parameters()).grad.to_local().view(-1)[0] = float('inf')\n"
    folder = folder_with(tmp_path / "s", script)
    replace(folder / script, f"{indent}# clip\n", f"{overflow}{indent}# clip\n")
    options = [*data, *PLAIN, FLOAT16, "amp.init_scale=256", "max_steps=4"]
    train(script, run, *options, "checkpoint.every_steps=1", "checkpoint.keep=9", folder=folder)
    two, three, four = (checkpoint_of(run, step) for step in (2, 3, 4))
    assert [state["scaler"]["scale"] for state in (two, three, four)] == [256, 128, 128]
    assert_same(two["model"], three["model"])
    assert_same(two["optimizer"]["state"], three["optimizer"]["state"])
    for name, weights in four["model"].items():
        assert weights.isfinite().all()
        assert not weights.equal(three["model"][name])
