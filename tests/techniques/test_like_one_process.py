"""Ranks and micro-batches train like one process on whole batches."""

import pytest
import torch

from tests.helpers import (
    checkpoint_of,
    folder_with,
    has_ranks,
    run_all,
    summary_of,
    train,
    values_of,
    weights_differ_by,
)
from tests.parts import rows_of
from tests.techniques import OPTIMIZERS, TEN

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "optimizer", "options", "of_weights", "of_values"),
    rows_of("LIKE_ONE_PROCESS"),
)
def test_ranks_and_parts_of_a_batch_train_like_one_process_on_the_whole(
    script, optimizer, options, of_weights, of_values, baselines, data, tmp_path
) -> None:
    """Up to these tolerances; and each sample is validated once: one of two ranks has one more."""
    one, other = baselines / optimizer, tmp_path / "run"
    overrides = [*data, *TEN, *OPTIMIZERS[optimizer], *options]
    train(script, other, *overrides, folder=folder_with(tmp_path / "s", script))
    assert weights_differ_by(other, one) < of_weights
    for tag in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/top1"):
        assert values_of(other, tag) == pytest.approx(values_of(one, tag), abs=of_values), tag
    assert checkpoint_of(other)["step"] == summary_of(other)["steps"] == 10
    assert summary_of(other)["world_size"] == 1 + has_ranks(script)


def test_the_layout_of_the_weights_may_change_when_a_run_goes_on(baselines, data, tmp_path) -> None:
    """The optimizer's values stay with the weights that they belong to."""
    commands = []
    for name, first, then in (("sgd", "true", "false"), ("adamw", "false", "true")):
        options = ["train.py", *data, *TEN, *OPTIMIZERS[name], f"output_dir={tmp_path / name}"]
        commands.append([*options, f"model.channels_last={first}", "max_steps=7"])
        commands.append([*options, f"model.channels_last={then}", "resume=auto"])
    run_all(commands, tmp_path)
    for name in ("sgd", "adamw"):
        assert weights_differ_by(tmp_path / name, baselines / name) < 1e-5
        states = (checkpoint_of(run / name)["optimizer"]["state"] for run in (tmp_path, baselines))
        torch.testing.assert_close(*states, rtol=1e-3, atol=1e-5)
