"""A merge of FSDP and mixed precision."""

import pytest

from tests.helpers import folder_with
from tests.processes import train
from tests.results import assert_same, checkpoint_of
from tests.techniques import FLOAT16, PLAIN

pytestmark = pytest.mark.slow


def test_an_overflow_in_one_ranks_part_skips_the_step_on_all(data, tmp_path) -> None:
    """Of the gradients' parts, only one of rank 1 is infinite in step 3."""
    script, run, indent = "train_fsdp_amp.py", tmp_path / "run", " " * 12
    overflow = f"{indent}if run.step_number == 3 and group.rank == 1:\n"
    overflow += f"{indent}    next(model.parameters()).grad.to_local().view(-1)[0] = float('inf')\n"
    folder = folder_with(tmp_path / "s", script, (f"{indent}# clip\n", overflow))
    options = [*data, *PLAIN, FLOAT16, "amp.init_scale=256", "max_steps=4"]
    train(script, run, *options, "checkpoint.every_steps=1", "checkpoint.keep=9", folder=folder)
    two, three, four = (checkpoint_of(run, step) for step in (2, 3, 4))
    assert [state["scaler"]["scale"] for state in (two, three, four)] == [256, 128, 128]
    assert_same(two["model"], three["model"])
    assert_same(two["optimizer"]["state"], three["optimizer"]["state"])
    for name, weights in four["model"].items():
        assert weights.isfinite().all()
        assert not weights.equal(three["model"][name])
