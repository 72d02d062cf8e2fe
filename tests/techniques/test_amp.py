"""Mixed precision."""

from functools import partial

import pytest

from tests.faults import script_with
from tests.helpers import REPOSITORY, cpu_with, run_all, run_to_end, summary_of
from tests.techniques import FLOAT16

pytestmark = pytest.mark.slow

AVX512 = {"avx2": True, "avx512_f": True, "avx512_bf16": False}


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


@pytest.mark.parametrize(
    ("features", "given", "expected"),
    [
        (AVX512, "auto", "float32"),
        (AVX512, "bfloat16", "bfloat16"),
        (AVX512 | {"avx512_bf16": True}, "auto", "bfloat16"),
        ({"neon": True, "bf16": True}, "auto", "bfloat16"),
        ({"neon": True, "bf16": False}, "auto", "float32"),
    ],
)
def test_bfloat16_is_for_cpus_that_compute_it_and_for_whoever_asks(
    features, given, expected, data, tmp_path
) -> None:
    options = [*data, f"amp.dtype={given}", "max_steps=1", f"output_dir={tmp_path / 'run'}"]
    watch = partial(cpu_with, features)
    [text] = run_all([["train_amp.py", *options]], tmp_path, 1, REPOSITORY, watch)
    assert summary_of(tmp_path / "run")["precision"] == expected
    assert f" parameters; {expected} on cpu" in text
    assert text.count("amp.dtype=bfloat16") == (expected == "float32")  # how to insist
    assert "has no effect" not in text
