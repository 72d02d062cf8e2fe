"""Mixed precision."""

import pytest

from tests.faults import script_with
from tests.helpers import run_to_end
from tests.techniques import FLOAT16

pytestmark = pytest.mark.slow


def test_a_loss_that_stays_nan_ends_the_run_when_the_scale_has_collapsed(data, tmp_path) -> None:
    """Scales 4 and 2 may be too high; of the steps at 1, 0.5 and 0.25, the third ends it."""
    script = "train_amp.py"
    folder = script_with(tmp_path / "s", script, "inputs = inputs * float('nan')")
    options = [*data, FLOAT16, "amp.init_scale=4", "max_bad_steps=3"]
    codes, [text] = run_to_end(script, tmp_path / "run", *options, folder=folder)
    assert codes == [2]
    bad = [line for line in text.splitlines() if "the gradient norm is not finite" in line]
    assert [line.partition(":")[0] for line in bad] == ["step 3", "step 4", "step 5"]
    assert "max_bad_steps=3 in a row" in bad[2]
