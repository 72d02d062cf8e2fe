"""Ranks and micro-batches train like one process on whole batches."""

from typing import Any

import pytest
import torch

from tests.helpers import folder_with, has_ranks
from tests.processes import train
from tests.results import checkpoint_of, summary_of, values_of, weights_differ_by
from tests.rows import rows
from tests.techniques import OPTIMIZERS, TEN

# script, optimizer, more options, and the largest differences of weights and of other values
QUICK: list[Any] = rows(
    ("train_ddp.py", "sgd", [], 1e-5, 1e-4),
    ("train_ddp_amp.py", "sgd", ["loader=dali"], 1e-5, 1e-4),
)
# Muon computes in bfloat16; the norms of gradients differ most.
MORE: list[Any] = rows(
    ("train_dp.py", "sgd", [], 1e-12, 1e-12),
    ("train_fsdp.py", "sgd", ["model.channels_last=true"], 1e-5, 1e-4),
    ("train_fsdp.py", "adamw", [], 1e-3, 1e-4),
    ("train_fsdp.py", "muon", [], 1e-3, 1e-3),
    ("train_amp.py", "sgd", ["amp.dtype=bfloat16"], 2e-2, 0.1),
    ("train_amp.py", "sgd", ["amp.dtype=float16", "amp.init_scale=256"], 2e-2, 0.1),
    ("train_ddp_amp.py", "sgd", ["loader=dali", "amp.dtype=bfloat16"], 2e-2, 0.1),
    ("train_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
    ("train_ddp_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
    ("train_fsdp_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
)


@pytest.mark.parametrize(
    ("script", "optimizer", "options", "of_weights", "of_values"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)],
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


@pytest.mark.slow
def test_the_layout_of_the_weights_may_change_when_a_run_goes_on(baselines, data, tmp_path) -> None:
    """The optimizer's values stay with the weights that they belong to."""
    one, other = baselines / "adamw", tmp_path / "run"
    options = [*data, *TEN, *OPTIMIZERS["adamw"]]
    train("train.py", other, *options, "model.channels_last=true", "max_steps=7")
    train("train.py", other, *options, "resume=auto")
    assert weights_differ_by(other, one) < 1e-5
    states = (checkpoint_of(run)["optimizer"]["state"] for run in (other, one))
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-5)
