"""Mixed precision."""

import logging

import pytest
import torch

from runtime.amp import amp_dtype
from tests.faults import script_with
from tests.helpers import folder_with
from tests.processes import cpu_with, train
from tests.results import steps_saved
from tests.rows import rows
from tests.techniques import FLOAT16, PLAIN

pytestmark = pytest.mark.slow


def test_a_scale_that_every_step_overflows_ends_the_run_once_it_is_below_1(data, tmp_path) -> None:
    """Scales of 16 to 1 may be too high. The weights stay as they are all the time."""
    script = "train_amp.py"
    folder = script_with(tmp_path / "s", script, "inputs = inputs * float('nan')")
    options = [*data, *PLAIN, FLOAT16, "amp.init_scale=16", "log.every_steps=2"]
    options += ["checkpoint.every_steps=4"]
    text = train(script, tmp_path / "run", *options, folder=folder, code=2)
    assert "scaled by 0.25" in text
    assert "step 5 " in text
    assert f"{tmp_path}/run/checkpoints/step-00000004" in text
    assert steps_saved(tmp_path / "run") == [4]


@pytest.mark.parametrize(
    ("features", "given", "expected"),
    [
        ({"avx512_f": True, "avx512_bf16": False}, "auto", torch.float32),
        ({"avx512_f": True, "avx512_bf16": False}, "bfloat16", torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": True}, "auto", torch.bfloat16),
        ({"neon": True, "bf16": True}, "auto", torch.bfloat16),
    ],
)
def test_bfloat16_is_for_cpus_that_compute_it_and_for_whoever_asks(
    features, given, expected, caplog
) -> None:
    with cpu_with(features, "train_amp.py"), caplog.at_level(logging.INFO):
        assert amp_dtype(given, torch.device("cpu")) == expected
    how_to_insist = "amp.dtype=bfloat16" in caplog.text
    assert how_to_insist == (expected == torch.float32)


@pytest.mark.parametrize("script", ["train_amp.py", *rows("train_ddp_amp.py")])
def test_a_run_validates_in_the_precision_of_its_training(script: str, data, tmp_path) -> None:
    place = "    # your own: loggers, callbacks\n"
    told = "lambda model, _, outputs: print('in training:', model.training, outputs.dtype)"
    hook = f"    getattr(model, 'module', model).register_forward_hook({told})\n"
    folder = folder_with(tmp_path / "s", script, (place, hook))
    options = [*data, "amp.dtype=bfloat16", "max_steps=1"]
    text = train(script, tmp_path / "run", *options, folder=folder)
    used = {line.partition("in training: ")[2] for line in text.splitlines()} - {""}
    assert used == {"True torch.bfloat16", "False torch.bfloat16"}
