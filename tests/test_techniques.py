"""What each technique promises: what it computes, what it saves, and what it names."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import has_ranks
from tests.images import small_digits
from tests.processes import run_to_end, train
from tests.results import (
    assert_same,
    checkpoint_of,
    published,
    scalars_of,
    summary_of,
    validated,
    values_of,
    weights_differ_by,
)
from tests.rows import rows

OPTIMIZERS: dict[str, list[str]] = dict(
    rows(
        ("sgd", ["optimizer=sgd", "optimizer.lr=0.02"]),
        ("adamw", ["optimizer=adamw"]),
        ("muon", ["optimizer.name=muon", "optimizer.layer_decay=0.7"]),
    )
)
# BatchNorm depends on the parts into which a batch is split; `train.py` may have AMP merged in.
TEN = ["model.kwargs.batch_norm=false", "amp.dtype=float32", "max_steps=10"]

# script, optimizer, more options, and the largest differences of weights and of other values
QUICK: list[Any] = rows(
    ("train_ddp.py", "sgd", [], 1e-5, 1e-4),
    ("train_ddp_amp.py", "sgd", ["loader=dali"], 1e-5, 1e-4),
)
COMPILED = "functools.partial(torch.compile, backend='aot_eager')"  # which needs no compiler
# Muon computes in bfloat16; the norms of gradients differ most.
MORE: list[Any] = rows(
    ("train_dp.py", "sgd", [], 1e-12, 1e-12),
    ("train_fsdp.py", "sgd", ["model.channels_last=true"], 1e-5, 1e-4),
    ("train_fsdp.py", "adamw", [], 1e-3, 1e-4),
    ("train_ddp.py", "sgd", ["loader=dali"], 1e-5, 1e-4),
    ("train_ddp.py", "adamw", ["model.compile=true"], 1e-3, 1e-4),
    ("train_fsdp.py", "muon", [], 1e-3, 1e-3),
    ("train_amp.py", "sgd", ["amp.dtype=bfloat16"], 2e-2, 0.1),
    ("train_ddp_amp.py", "sgd", ["loader=dali", "amp.dtype=bfloat16"], 2e-2, 0.1),
    ("train_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
    ("train_fsdp_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """9 samples validate: 5 on one of two ranks, 4 on the other."""
    small = small_digits(tmp_path_factory)
    return [*small, "global_batch_size=8", "log.every_steps=1", "log.images=0"]


@pytest.fixture(scope="module")
def baseline_of(data, tmp_path_factory) -> Callable[[str], Path]:
    """Function that returns a run of ten steps of `train.py` with an optimizer."""
    folder = tmp_path_factory.mktemp("baselines")

    @cache
    def trained(optimizer: str) -> Path:
        train("train.py", folder / optimizer, *data, *TEN, *OPTIMIZERS[optimizer])
        return folder / optimizer

    return trained


@pytest.mark.parametrize(
    ("script", "optimizer", "options", "of_weights", "of_values"),
    [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)],
)
def test_ranks_and_parts_of_a_batch_train_like_one_process_on_the_whole(
    script, optimizer, options, of_weights, of_values, baseline_of, data, tmp_path
) -> None:
    """Up to these tolerances; and each sample is validated once: one of two ranks has one more."""
    one, other = baseline_of(optimizer), tmp_path / "run"
    overrides = [*data, *TEN, *OPTIMIZERS[optimizer], *options]
    edits = [("import torch\n", f"import functools\nimport torch\ntorch.compile = {COMPILED}\n\n")]
    train(script, other, *overrides, edits=edits if "model.compile=true" in options else [])
    assert weights_differ_by(other, one) < of_weights
    for tag in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/top1"):
        assert values_of(other, tag) == pytest.approx(values_of(one, tag), abs=of_values), tag
    assert checkpoint_of(other)["step"] == summary_of(other)["steps"] == 10
    assert summary_of(other)["world_size"] == 1 + has_ranks(script)


@pytest.mark.slow
def test_the_layout_of_the_weights_may_change_when_a_run_goes_on(
    baseline_of, data, tmp_path
) -> None:
    """The optimizer's values stay with the weights that they belong to."""
    one, other = baseline_of("adamw"), tmp_path / "run"
    options = [*data, *TEN, *OPTIMIZERS["adamw"]]
    train("train.py", other, *options, "model.channels_last=true", "max_steps=7")
    train("train.py", other, *options, "resume=auto")
    assert weights_differ_by(other, one) < 1e-5
    states = (checkpoint_of(run)["optimizer"]["state"] for run in (other, one))
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-5)


OPTIONS = ["ema.decay=0.3", "checkpoint.every_steps=1", "checkpoint.keep=99", "max_steps=9"]
OPTIONS += ["global_batch_size=16", "optimizer.lr=0.02"]  # the average differs from the weights


def average_of(state: dict) -> dict[str, Tensor]:
    """The averaged model in a checkpoint."""
    return {name: state["ema"][f"module.{name}"] for name in state["model"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "overrides"),
    rows(("train_ema.py", []), ("train_ema_fsdp.py", ["model.kwargs.batch_norm=false"])),
)
def test_the_average_is_what_is_evaluated_chosen_and_published(
    script: str, overrides: list[str], data, tmp_path
) -> None:
    run = tmp_path / "run"
    train(script, run, *data, *OPTIONS, *overrides)
    expected: dict[str, Tensor] = {}
    states = [checkpoint_of(run, step) for step in range(1, 10)]
    for n, state in enumerate(states):
        decay = min(0.3, (1 + n) / (10 + n)) if n else 0
        for name, now in state["model"].items():
            average = decay * expected.get(name, now) + (1 - decay) * now
            expected[name] = average if now.is_floating_point() else now
        torch.testing.assert_close(average_of(state), expected, rtol=1e-4, atol=1e-6)
        assert state["ema"]["n_averaged"] == n + 1

    ends = [4, 8, 9]  # of epochs
    by_hand = {end: validated(average_of(states[end - 1]), [*data, *overrides]) for end in ends}
    losses = {end: metrics["val/loss"] for end, metrics in by_hand.items()}
    assert dict(scalars_of(run, "val/loss")) == pytest.approx(losses, rel=1e-4)
    trained = validated(states[-1]["model"], [*data, *overrides])
    assert abs(trained["val/loss"] - losses[9]) > 1e-3

    best = checkpoint_of(run, best=True)
    assert best["step"] == max(ends, key=lambda end: (by_hand[end]["val/top1"], -losses[end]))
    assert_same(published(run), average_of(best))


OLD, NEW, ARM = {"avx512_bf16": False}, {"avx512_bf16": True}, {"neon": True, "bf16": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "features", "given", "expected"),
    rows(
        ("train_amp.py", OLD, "auto", "float32"),
        ("train_amp.py", OLD, "bfloat16", "bfloat16"),
        ("train_amp.py", ARM, "auto", "bfloat16"),
        ("train_ddp_amp.py", NEW, "auto", "bfloat16"),
    ),
)
def test_bfloat16_is_for_cpus_that_compute_it_and_for_whoever_asks_and_validation_has_it_too(
    script, features, given, expected, data, tmp_path
) -> None:
    tell = "lambda model, _, outputs: print('in training:', model.training, outputs.dtype)"
    hook = f"    getattr(model, 'module', model).register_forward_hook({tell})\n"
    cpu = f"    import torch; torch.cpu.get_capabilities = lambda: {features}\n"
    edits = [("    run_main(main)\n", cpu), ("    # your own: loggers, callbacks\n", hook)]
    options = [*data, f"amp.dtype={given}", "max_steps=1"]
    text = train(script, tmp_path / "run", *options, edits=edits)
    used = set(re.findall("in training: (.*)", text))
    assert used == {f"True torch.{expected}", f"False torch.{expected}"}
    assert summary_of(tmp_path / "run")["precision"] == expected
    how_to_insist = "amp.dtype=bfloat16" in text
    assert how_to_insist == (expected == "float32")


@pytest.mark.slow
@pytest.mark.parametrize("script", rows("train_ddp.py"))
def test_a_layer_that_is_not_used_is_named_under_ddp(script, data, tmp_path) -> None:
    edits = [("    # optimizer\n", "    model.extra = torch.nn.Linear(3, 3)\n\n")]
    options = [*data, "model.kwargs.batch_norm=false"]
    codes, prints = run_to_end(script, tmp_path / "run", *options, edits=edits)
    assert codes == [2, 2], prints
    assert all("extra.weight" in text.splitlines()[-1] for text in prints)
