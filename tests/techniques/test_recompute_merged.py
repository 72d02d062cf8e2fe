"""Recomputed activations, merged with other techniques."""

import pytest

from tests.faults import assert_same_state
from tests.helpers import folder_with, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("others", ["ddp", "fsdp", "amp_accumulate", "amp_ema_fsdp", "dp"])
def test_recomputing_changes_no_bit_of_a_merged_script(others: str, data, tmp_path) -> None:
    for name in (others, f"{others}_recompute"):
        script = f"train_{name}.py"
        options = ["max_steps=4", "accumulate_steps=2"] if "accumulate" in name else ["max_steps=4"]
        folder = folder_with(tmp_path / "scripts" / name, script)
        train(script, tmp_path / name, *data, *options, folder=folder)
    assert_same_state(tmp_path / others, tmp_path / f"{others}_recompute")
