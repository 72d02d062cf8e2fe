"""What each technique promises: what it computes, what it saves, and what it sends."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from runtime.distributed import shard
from tests.faults import assert_same, script_with
from tests.helpers import (
    checkpoint_of,
    folder_with,
    has_ranks,
    join,
    published,
    refused,
    replace,
    run_all,
    run_to_end,
    scalars_of,
    start_process,
    summary_of,
    train,
    validated,
    values_of,
    weights_differ_by,
)
from tests.images import digit_folders

OPTIMIZERS = {"sgd": ["optimizer=sgd", "optimizer.lr=0.02"], "adamw": ["optimizer=adamw"]}
FLOAT16 = "amp.dtype=float16"
PLAIN = ["model.kwargs.batch_norm=false"]
"""BatchNorm depends on the parts into which a batch is split."""
TEN = [*PLAIN, "max_steps=10"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """66 digits of three classes, and 9 that validate: 5 on one of two ranks, 4 on the other."""
    root = digit_folders(tmp_path_factory.mktemp("images"), range(3), 22, 3)
    return [
        *("data=imagefolder", f"data.root={root}"),
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        *("data.resize=null", "data.crop=[20,20]", "data.random_crop=true"),
        *("data.mean=[0.5]", "data.std=[0.25]", "model.kwargs.width=8", "global_batch_size=8"),
        *("epochs=3", "log.every_steps=1", "log.images=0"),
    ]


@pytest.fixture(scope="module")
def baselines(data, tmp_path_factory) -> Path:
    """Folder with a run of ten steps of `train.py` with each optimizer."""
    folder = tmp_path_factory.mktemp("baselines")
    options = ["train.py", *data, *TEN]
    rows = OPTIMIZERS.items()
    run_all([[*options, *row, f"output_dir={folder / name}"] for name, row in rows], folder)
    return folder


@pytest.mark.parametrize(
    ("script", "optimizer", "options", "of_weights", "of_values"),
    [
        ("train_dp.py", "sgd", [], 1e-12, 1e-12),
        ("train_ddp.py", "sgd", [], 1e-5, 1e-4),
        ("train_fsdp.py", "sgd", ["model.channels_last=true"], 1e-5, 1e-4),
        ("train_fsdp.py", "adamw", [], 1e-3, 1e-4),
        ("train_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
        ("train_ddp_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
        ("train_fsdp_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
        ("train_amp.py", "sgd", ["amp.dtype=float32"], 1e-12, 1e-12),
        # The norms of gradients differ most.
        ("train_amp.py", "sgd", ["amp.dtype=bfloat16"], 2e-2, 0.1),
        ("train_amp.py", "sgd", [FLOAT16, "amp.init_scale=256"], 2e-2, 0.1),
    ],
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


EMA = ["ema.decay=0.3", "checkpoint.every_steps=1", "checkpoint.keep=99", "max_steps=9"]
EMA += ["global_batch_size=16", "optimizer.lr=0.02"]  # so that the average differs from the weights


def average_of(state: dict) -> dict[str, Tensor]:
    """The averaged model in a checkpoint."""
    return {name: state["ema"][f"module.{name}"] for name in state["model"]}


@pytest.mark.parametrize(
    ("script", "overrides"), [("train_ema.py", []), ("train_ema_fsdp.py", PLAIN)]
)
def test_the_average_is_what_is_evaluated_chosen_and_published(
    script: str, overrides: list[str], data, tmp_path
) -> None:
    run, folder = tmp_path / "run", folder_with(tmp_path / "s", script)
    train(script, run, *data, *EMA, *overrides, folder=folder)
    expected: dict[str, Tensor] = {}
    states = [checkpoint_of(run, f"step-{step:08d}.pt") for step in range(1, 10)]
    for n, state in enumerate(states):
        decay = min(0.3, (1 + n) / (10 + n)) if n else 0
        for name, now in state["model"].items():
            average = decay * expected.get(name, now) + (1 - decay) * now
            expected[name] = average if now.is_floating_point() else now
        torch.testing.assert_close(average_of(state), expected, rtol=1e-4, atol=1e-6)
        assert state["ema"]["n_averaged"] == n + 1

    ends = [4, 8, 9]  # of epochs
    by_hand = {end: validated(average_of(states[end - 1]), [*data, *overrides]) for end in ends}
    for tag in ("val/loss", "val/top1"):
        expected_values = {end: metrics[tag] for end, metrics in by_hand.items()}
        assert dict(scalars_of(run, tag)) == pytest.approx(expected_values, rel=1e-4)
    trained = validated(states[-1]["model"], [*data, *overrides])
    assert abs(trained["val/loss"] - by_hand[9]["val/loss"]) > 1e-3

    best = checkpoint_of(run, "best.pt")
    ranks = {end: (metrics["val/top1"], -metrics["val/loss"]) for end, metrics in by_hand.items()}
    assert best["step"] == max(ends, key=lambda end: ranks[end])
    assert_same(published(run), average_of(best))


def shard_blocks(rank: int, place: str) -> None:
    """Shard a model of blocks of 36 MiB each, which malloc gives back at once."""
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    side, num_blocks = 3072, 8
    blocks = [nn.Linear(1, 1, bias=False) for _ in range(num_blocks)]
    for block in blocks:  # of one number until they are moved
        block.weight = nn.Parameter(torch.ones(()).expand(side, side))
    shard(nn.Sequential(nn.Linear(1, 1)), torch.device("cpu"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = shard(nn.Sequential(*blocks), torch.device("cpu"))
    shards: list[Any] = list(model.parameters())
    assert all(part.to_local().eq(1).all() for part in shards)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < (num_blocks / 2 + 2.5) * side * side * 4, grown
    dist.destroy_process_group()


def test_no_rank_holds_more_than_its_shards_and_a_block_when_a_model_is_sharded(tmp_path) -> None:
    ranks = [start_process(shard_blocks, rank, f"file://{tmp_path / 'place'}") for rank in (0, 1)]
    assert join(ranks) == [0, 0]


def test_parameters_that_fsdp_cannot_divide_are_named() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    scalar = nn.Sequential(nn.Linear(4, 4))
    scalar.register_parameter("scale", nn.Parameter(torch.ones(())))
    for model, names in ((tied, "0.weight, 2.weight"), (scalar, "scale")):
        with refused(names, "train_ddp.py"):
            shard(model, torch.device("cpu"))


def test_a_layer_that_is_not_used_is_named_under_ddp(data, tmp_path) -> None:
    script = "train_ddp.py"
    folder = folder_with(tmp_path / "s", script)
    replace(
        folder / script,
        "    # optimizer\n",
        "    model.extra = nn.Linear(3, 3)\n\n    # optimizer\n",
    )
    codes, prints = run_to_end(script, tmp_path / "run", *data, *PLAIN, folder=folder)
    for code, text in zip(codes, prints, strict=True):
        assert code == 2, text
        assert "extra.weight" in text.splitlines()[-1]


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


def test_the_layout_of_the_weights_may_change_when_a_run_goes_on(baselines, data, tmp_path) -> None:
    """The optimizer's values stay with the weights that they belong to."""
    commands = []
    for name, first, then in (("sgd", "true", "false"), ("adamw", "false", "true")):
        options = ["train.py", *data, *TEN, *OPTIMIZERS[name], f"output_dir={tmp_path / name}"]
        commands.append([*options, f"model.channels_last={first}", "max_steps=7"])
        commands.append([*options, f"model.channels_last={then}", "resume=auto"])
    run_all(commands, tmp_path)
    for name in OPTIMIZERS:
        assert weights_differ_by(tmp_path / name, baselines / name) < 1e-5
        states = (checkpoint_of(run / name)["optimizer"]["state"] for run in (tmp_path, baselines))
        torch.testing.assert_close(*states, rtol=1e-3, atol=1e-5)
