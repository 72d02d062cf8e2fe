"""What each technique promises: what it computes, what it saves, and what it sends."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from runtime.preemption import EXIT_CODE
from runtime.shards import remove_shards
from runtime.whole import make_whole
from tests.faults import assert_same, assert_same_state, run_to_end, script_with
from tests.helpers import (
    ENVIRONMENT,
    REPOSITORY,
    checkpoint_of,
    folder_with,
    free_port,
    published,
    scalars_of,
    summary_of,
    train,
    validated,
)

NUM_TRAIN = 64
PER_EPOCH = 8
SGD = ["optimizer=sgd", "optimizer.lr=0.02"]
FLOAT16 = "amp.dtype=float16"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """73 images in three classes, of which 9 validate: 5 on one of two ranks, 4 on the other."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for number in range(NUM_TRAIN + 9):
        path = root / f"class{number % 3}" / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = random.integers(0, 120, (16, 16)) + 60 * (number % 3)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return [
        "data=imagefolder",
        f"data.root={root}",
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        "data.val_count=9",
        "data.resize=null",
        "data.crop=null",
        "data.mean=[0.5]",
        "data.std=[0.25]",
        "model.kwargs.width=8",
        "global_batch_size=8",
        "epochs=3",
        "log.every_steps=1",
        "log.images=0",
    ]


@pytest.fixture(scope="module")
def exact(data) -> list[str]:
    """BatchNorm depends on the parts into which a batch is split."""
    return [*data, "model.kwargs.batch_norm=false"]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Output folder of a run with these overrides, each made when first asked for."""
    folders: dict[tuple[str, ...], Path] = {}

    def folder_of(script: str, *overrides: str) -> Path:
        key = (script, *overrides)
        if key not in folders:
            folder = tmp_path_factory.mktemp("runs")
            train(
                script,
                folder / "run",
                *data,
                *overrides,
                folder=folder_with(folder / "s", script),
            )
            folders[key] = folder / "run"
        return folders[key]

    return folder_of


PLAIN = ["model.kwargs.batch_norm=false"]
TWENTY = [*PLAIN, "max_steps=20"]


def difference(one: Path, other: Path) -> float:
    """The largest of any weight in the newest checkpoints."""
    first, second = checkpoint_of(one)["model"], checkpoint_of(other)["model"]
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def values_of(run: Path, tag: str) -> list[float]:
    return [value for _, value in scalars_of(run, tag)]


# Gradient accumulation

ACCUMULATING = ["train_accumulate.py", "train_ddp_accumulate.py", "train_fsdp_accumulate.py"]


@pytest.mark.parametrize("script", ACCUMULATING)
def test_the_parts_of_a_batch_add_up_to_the_step_of_the_whole(script: str, runs) -> None:
    whole = runs("train.py", *TWENTY, *SGD)
    parts = runs(script, *TWENTY, *SGD, "accumulate_steps=4")
    assert checkpoint_of(parts)["step"] == summary_of(parts)["steps"] == 20
    assert difference(parts, whole) < 1e-5
    for tag in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/top1"):
        assert values_of(parts, tag) == pytest.approx(values_of(whole, tag), abs=1e-4), tag
    assert difference(runs("train.py", *PLAIN, *SGD, "max_steps=19"), whole) > 1e-4


def collectives(script: str, accumulate_steps: int, data: list[str], folder: Path) -> dict:
    """How often rank 0 called each collective in the steps 3 and 4."""
    counts = folder / f"{accumulate_steps}.json"
    text = script_with(
        folder / f"s{accumulate_steps}",
        script,
        "from torch.profiler import ProfilerActivity, profile",
        "seen = globals().setdefault('seen', set())",
        "if step == 3 and 3 not in seen:",
        "    globals()['profiler'] = profile(activities=[ProfilerActivity.CPU])",
        "    profiler.start()",
        "if step == 5 and 5 not in seen:",
        "    profiler.stop()",
        "    counts = {event.key: event.count for event in profiler.key_averages()}",
        "    import json",
        f"    rank or open({str(counts)!r}, 'w').write(json.dumps(counts))",
        "seen.add(step)",
    )
    options = [*data, *PLAIN, f"accumulate_steps={accumulate_steps}", "max_steps=5"]
    train(script, folder / f"run{accumulate_steps}", *options, folder=text)
    counted = json.loads(counts.read_text())
    return {name: count for name, count in counted.items() if name.startswith("c10d::")}


@pytest.mark.parametrize("script", ACCUMULATING[1:])
def test_gradients_travel_once_in_each_optimizer_step(script: str, data, tmp_path) -> None:
    """Beside them, each step asks what all ranks wish and averages the loss that is logged."""
    one, four = (collectives(script, number, data, tmp_path) for number in (1, 4))
    name = "c10d::_reduce_scatter_base_" if "fsdp" in script else "c10d::allreduce_"
    assert one[name] >= 2
    assert four[name] == one[name]
    assert four["c10d::allreduce_"] == one["c10d::allreduce_"]


def test_the_parts_of_a_rank_are_of_its_own_share(data, tmp_path) -> None:
    folder = folder_with(tmp_path / "s", "train_ddp_accumulate.py")
    options = [*data, "accumulate_steps=8", "max_steps=1"]
    _, texts = run_to_end("train_ddp_accumulate.py", tmp_path / "run", *options, folder=folder)
    message = "accumulate_steps=8 does not divide the 4 samples that each rank has of global_batch"
    assert any(message in text for text in texts)


def test_a_signal_between_two_parts_lets_the_step_end(runs, data, tmp_path) -> None:
    script, run = "train_accumulate.py", tmp_path / "run"
    folder = script_with(
        tmp_path / "s",
        script,
        "step == 5 and not run.is_last_micro_batch and os.kill(os.getpid(), 15)",
    )
    options = ["accumulate_steps=4", "max_steps=12"]
    codes, prints = run_to_end(script, run, *data, *options, "resume=auto", folder=folder)
    assert codes == [EXIT_CODE], prints
    assert checkpoint_of(run)["step"] == 5
    train(script, run, *data, *options, "resume=auto")
    whole = runs(script, *options)
    assert_same_state(run, whole)
    assert scalars_of(run, "train/loss") == scalars_of(whole, "train/loss")


# Averaged weights

DECAY = 0.3
EMA = [f"ema.decay={DECAY}", "checkpoint.every_steps=1", "checkpoint.keep=99", "max_steps=18"]


def average_of(state: dict) -> dict[str, Tensor]:
    """The averaged model in a checkpoint."""
    prefix = "module."
    return {
        name.removeprefix(prefix): value
        for name, value in state["ema"].items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("script", "overrides"), [("train_ema.py", []), ("train_ema_fsdp.py", PLAIN)]
)
def test_the_average_is_what_is_evaluated_chosen_and_published(
    script: str, overrides: list[str], runs, data
) -> None:
    run = runs(script, *EMA, *overrides)
    expected: dict[str, Tensor] = {}
    states = [checkpoint_of(run, f"step-{step:08d}.pt") for step in range(1, 19)]
    for n, state in enumerate(states):
        decay = min(DECAY, (1 + n) / (10 + n)) if n else 0
        for name, now in state["model"].items():
            is_count = not now.is_floating_point()
            before = expected.get(name, now)
            expected[name] = now if is_count else decay * before + (1 - decay) * now
        torch.testing.assert_close(average_of(state), expected, rtol=1e-4, atol=1e-6)
        assert state["ema"]["n_averaged"] == n + 1

    ends = [PER_EPOCH, 2 * PER_EPOCH, 18]
    by_hand = {end: validated(average_of(states[end - 1]), [*data, *overrides]) for end in ends}
    for tag in ("val/loss", "val/top1"):
        found = scalars_of(run, tag)
        assert [step for step, _ in found] == ends
        assert [value for _, value in found] == pytest.approx(
            [by_hand[end][tag] for end in ends], rel=1e-4
        )
    trained = validated(states[-1]["model"], [*data, *overrides])
    assert abs(trained["val/loss"] - by_hand[18]["val/loss"]) > 1e-3

    best = checkpoint_of(run, "best.pt")
    assert best["step"] == max(ends, key=lambda end: by_hand[end]["val/top1"])
    assert_same(published(run), average_of(best))


def test_all_ranks_evaluate_the_same_averaged_statistics(data, tmp_path) -> None:
    """On the CPU each rank has BatchNorm statistics of its own."""
    script = "train_ddp_ema.py"
    path = folder_with(tmp_path / "s", script) / script
    note = "        torch.save(ema.state_dict(), f'{folder}/{when}-{{group.rank}}.pt')\n"
    text = path.read_text()
    for line, when in (("sync_buffers(state)", "before"), ("# validation", "after")):
        line = f"        {line}\n"
        assert text.count(line) == 1
        text = text.replace(line, note.format(folder=tmp_path, when=when) + line)
    path.write_text("import torch\n" + text)
    train(script, tmp_path / "run", *data, "max_steps=3", folder=tmp_path / "s")
    averages = {
        when: [torch.load(tmp_path / f"{when}-{rank}.pt") for rank in (0, 1)]
        for when in ("before", "after")
    }
    name = "module.features.0.1.running_mean"
    assert not torch.equal(averages["before"][0][name], averages["before"][1][name])
    assert_same(*averages["after"])
    assert_same(averages["after"][0], averages["before"][0])


def test_an_average_begins_with_the_weights_of_a_run_that_had_none(runs, data, tmp_path) -> None:
    before, run = runs("train.py", "max_steps=8"), tmp_path / "run"
    printed = train("train_ema.py", run, *data, "max_steps=9", f"resume={before}")
    assert "holds no ema state: the ema starts fresh" in printed
    state = checkpoint_of(run)
    assert state["step"] == 9
    assert_same(average_of(state), dict(state["model"]))  # the first step is not averaged yet
    assert validated(average_of(state), data)["val/loss"] == pytest.approx(
        summary_of(run)["val/loss"], rel=1e-4
    )


def test_an_average_without_a_step_of_its_own_is_of_the_loaded_weights(data, tmp_path) -> None:
    """The run was stopped after its last step, before the validation."""
    run, last = tmp_path / "run", ["max_steps=4"]
    folder = script_with(tmp_path / "s", "train.py", "step == 4 and os.kill(os.getpid(), 15)")
    codes, prints = run_to_end("train.py", run, *data, *last, folder=folder)
    assert codes == [EXIT_CODE], prints
    train("train_ema.py", run, *data, *last, "resume=auto")
    state = checkpoint_of(run)
    assert_same(average_of(state), dict(state["model"]))
    assert validated(dict(state["model"]), data)["val/loss"] == pytest.approx(
        summary_of(run)["val/loss"], rel=1e-4
    )


# Fully sharded data parallelism


@pytest.mark.parametrize(
    ("optimizer", "tolerance"), [(SGD, 1e-5), (["optimizer=adamw"], 1e-3)], ids=["sgd", "adamw"]
)
def test_sharded_training_is_that_of_one_process(optimizer, tolerance: float, runs) -> None:
    one, two = runs("train.py", *TWENTY, *optimizer), runs("train_fsdp.py", *TWENTY, *optimizer)
    assert difference(one, two) < tolerance
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        assert values_of(two, tag) == pytest.approx(values_of(one, tag), abs=1e-4), tag
    assert summary_of(two)["world_size"] == 2


def test_sharded_training_takes_inputs_in_channels_last(runs) -> None:
    plain, last = (
        runs("train_fsdp.py", *TWENTY, *SGD, *options)
        for options in ([], ["model.channels_last=true"])
    )
    assert difference(plain, last) < 1e-5


def test_whole_files_of_sharded_checkpoints_are_those_of_one_process(runs, tmp_path) -> None:
    """Names, types, shapes and nesting."""

    def shape_of(value):
        if isinstance(value, Tensor):
            assert type(value) is Tensor
            return (value.dtype, value.shape)
        if isinstance(value, dict):
            return {key: shape_of(part) for key, part in value.items()}
        return [shape_of(part) for part in value] if isinstance(value, list) else type(value)

    for optimizer in (SGD, ["optimizer=adamw"]):
        one, two = (runs(script, *TWENTY, *optimizer) for script in ("train.py", "train_fsdp.py"))
        copy = tmp_path / optimizer[0]
        shutil.copytree(two, copy)
        sharded = {name: checkpoint_of(copy, name) for name in ("last.pt", "best.pt")}
        make_whole(copy)
        assert not list(copy.glob("checkpoints/shards-*"))
        for name, state in sharded.items():
            whole = torch.load(copy / "checkpoints" / name, weights_only=True)
            assert_same(whole["model"], state["model"])
            assert whole["step"] == state["step"]
        first = checkpoint_of(one)
        for name in ("model", "optimizer", "scheduler", "loader", "guard", "run"):
            assert shape_of(first[name]) == shape_of(sharded["last.pt"][name]), name
        assert_same(published(copy), sharded["best.pt"]["model"])
        assert shape_of(published(copy)) == shape_of(published(one))


def test_a_run_goes_on_sharded_and_whole_in_turn(runs, data, tmp_path) -> None:
    """The optimizer's state is loaded as well, or the weights would leave those of the whole run."""
    run, optimizer = tmp_path / "run", ["optimizer=adamw"]
    scripts = ["train.py", "train_fsdp.py", "train_ddp.py", "train_fsdp.py"]
    for script, last_step in zip(scripts, (4, 9, 14, 20), strict=True):
        options = [*data, *TWENTY, *optimizer, f"max_steps={last_step}", "resume=auto"]
        if last_step == 14:
            codes, prints = run_to_end(script, run, *options)
            assert codes == [2, 2]
            assert "python -m runtime.whole" in prints[0]
        if script != "train_fsdp.py" and last_step > 4:
            assert make_whole(run)
        printed = train(script, run, *options)
        assert ("resumed from" in printed) == (last_step > 4)
        assert checkpoint_of(run)["step"] == last_step
    whole = runs("train.py", *TWENTY, *optimizer)
    assert difference(run, whole) < 1e-3
    assert values_of(run, "train/loss") == pytest.approx(values_of(whole, "train/loss"), abs=1e-4)


def test_a_sharded_run_goes_on_with_other_ranks_and_keeps_what_its_checkpoints_name(
    runs, data, tmp_path
) -> None:
    """First the newest checkpoint is damaged: it goes on from the one before."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    options = [*data, *TWENTY, *SGD, "checkpoint.every_steps=2", "resume=auto"]

    def folders() -> list[Path]:
        return sorted(checkpoints.glob("shards-*"))

    train("train_fsdp.py", run, *options, "max_steps=6")
    states = [torch.load(path, weights_only=True) for path in sorted(checkpoints.glob("step-*.pt"))]
    assert [state["step"] for state in states] == [4, 6]
    assert folders() == sorted(checkpoints / state["shards"]["folder"] for state in states)
    file = max((checkpoints / states[1]["shards"]["folder"]).iterdir())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    codes, prints = run_to_end("train_fsdp.py", run, *options, "max_steps=20", num_ranks=4)
    assert codes == [0] * 4, prints
    assert f"wrong checksum of {file.relative_to(checkpoints)}" in prints[0]
    assert "resumed from" in prints[0]
    assert difference(run, runs("train.py", *TWENTY, *SGD)) < 1e-5
    named = {
        torch.load(path, weights_only=True)["shards"]["folder"] for path in checkpoints.glob("*.pt")
    }
    assert {path.name for path in folders()} == named

    # While one of the files cannot be read, nobody knows its shards.
    before = folders()
    last = max(checkpoints.glob("step-*.pt"))
    content = last.read_bytes()
    last.write_bytes(content[:1000])
    remove_shards(checkpoints)
    assert folders() == before
    train("train.py", run, *data, *TWENTY, "max_steps=1", "overwrite=true")
    assert not folders()


SHARDED_IN_PART = """
import resource, sys, threading
import torch
import torch.distributed as dist
from torch import nn
from runtime.distributed import shard

rank, world_size, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
SIDE, BLOCKS = 2048, 16  # 16 MiB each
blocks = [nn.Linear(1, 1, bias=False) for _ in range(BLOCKS)]
for block in blocks:  # of one number until they are moved
    block.weight = nn.Parameter(torch.ones(()).expand(SIDE, SIDE))
shard(nn.Sequential(nn.Linear(1, 1)), torch.device("cpu"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = shard(nn.Sequential(*blocks), torch.device("cpu"))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
block = SIDE * SIDE * 4 / 2**20
assert all(p.to_local().eq(1).all() for p in model.parameters())
assert grown < BLOCKS * block / world_size + 2.5 * block, grown
dist.destroy_process_group()
"""


def test_no_rank_holds_more_than_its_shards_and_a_block_when_a_model_is_sharded() -> None:
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED_IN_PART, str(rank), "4", port],
            cwd=REPOSITORY,
            # Memory that is freed goes back at once.
            env={**os.environ, **ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        )
        for rank in range(4)
    ]
    assert [rank.wait(240) for rank in ranks] == [0] * 4


@pytest.mark.parametrize("script", ["train_fsdp.py", "train_ddp.py"])
def test_unequal_shards_of_the_validation_count_every_sample_once(
    script: str, data, tmp_path
) -> None:
    """One rank has 5 of the 9 samples and a batch more than the other."""
    options = [*data, *PLAIN, "max_steps=2"]
    codes, prints = run_to_end(script, tmp_path / "run", *options)
    assert codes == [0, 0], "\n".join(prints)
    summary, weights = summary_of(tmp_path / "run"), published(tmp_path / "run")
    for name, value in validated(weights, options).items():
        assert summary[name] == pytest.approx(value, rel=1e-5), name


def test_an_overflow_in_one_ranks_part_skips_the_step_on_all(data, tmp_path) -> None:
    """Of the gradients' parts, only one of rank 1 is infinite in step 3."""
    script = "train_fsdp_amp.py"
    path = folder_with(tmp_path / "s", script) / script
    clip = "            # clip\n"
    text = path.read_text()
    assert text.count(clip) == 1
    overflow = (
        "            if run.step_number == 2 and group.rank == 1:\n"
        "                next(model.parameters()).grad.to_local().view(-1)[0] = float('inf')\n"
    )
    path.write_text(text.replace(clip, overflow + clip))
    options = [*data, *PLAIN, FLOAT16, "amp.init_scale=256"]
    for steps in (2, 3, 4):
        last = f"max_steps={steps}"
        train(script, tmp_path / f"{steps}", *options, last, folder=tmp_path / "s")
    two, three, four = (checkpoint_of(tmp_path / f"{steps}") for steps in (2, 3, 4))
    assert [state["scaler"]["scale"] for state in (two, three, four)] == [256, 128, 128]
    assert_same(two["model"], three["model"])
    assert_same(two["optimizer"]["state"], three["optimizer"]["state"])
    assert difference(tmp_path / "3", tmp_path / "4") > 1e-4
    assert all(value.isfinite().all() for value in four["model"].values())
    assert summary_of(tmp_path / "4")["bad_steps"] == 0


# Mixed precision


def test_finding_the_first_scale_is_no_bad_step(data, tmp_path) -> None:
    """Of float16 the largest number is 65,504, and the first scale is 65,536."""
    run = tmp_path / "run"
    options = [*data, *PLAIN, FLOAT16, "data.std=[0.001]", "max_steps=16"]
    printed = train("train_amp.py", run, *options)
    state = checkpoint_of(run)
    assert state["config"]["amp"]["init_scale"] == 65536
    num_skipped = math.log2(65536 / state["scaler"]["scale"])
    assert num_skipped >= 1
    assert state["optimizer"]["state"][0]["step"] == 16 - num_skipped
    assert "not finite" not in printed
    assert summary_of(run)["bad_steps"] == state["guard"]["num_bad_steps"] == 0


def test_a_loss_that_stays_nan_ends_the_run_when_the_scale_has_collapsed(data, tmp_path) -> None:
    """4 and 2 are scales that may be too high; of the steps at 1, 0.5 and 0.25 the third ends it."""
    script = "train_amp.py"
    folder = script_with(tmp_path / "s", script, "inputs = inputs * float('nan')")
    options = [*data, FLOAT16, "amp.init_scale=4", "max_bad_steps=3"]
    codes, [text] = run_to_end(script, tmp_path / "run", *options, folder=folder)
    assert codes == [2]
    bad = [line for line in text.splitlines() if "the gradient norm is not finite" in line]
    assert [line.split(": the gradient")[0] for line in bad] == [
        "step 3",
        "step 4",
        "step 5",
    ]
    assert "max_bad_steps=3 in a row" in bad[2]


# Dropout

DROPOUT = """
class Dropout(nn.Module):
    def forward(self, inputs):
        mask = nn.functional.dropout(torch.ones_like(inputs), 0.5, self.training)
        if self.training:
            with open("{file}" + os.environ.get("RANK", "0"), "a") as file:
                print(mask.gt(0).int().flatten().tolist(), file=file)
        return inputs * mask


build_without = build_model


def build_model(*arguments):
    model = build_without(*arguments)
    model.classifier = nn.Sequential(Dropout(), model.classifier)
    return model


@hydra.main("""


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_each_rank_drops_other_units_and_the_same_again_after_a_resume(
    script: str, data, tmp_path
) -> None:
    masks, num_ranks = {}, 2
    for name, ends in {"whole": [12], "stopped": [3, 12]}.items():
        folder = folder_with(tmp_path / f"{name}-s", script)
        text = (folder / script).read_text()
        code = DROPOUT.format(file=tmp_path / name)
        text = "import os\nimport torch\n" + text.replace("@hydra.main(", code, 1)
        (folder / script).write_text(text)
        for end in ends:
            options = [*data, f"max_steps={end}", "resume=auto"]
            train(script, tmp_path / f"{name}-run", *options, folder=folder)
        masks[name] = [
            (tmp_path / f"{name}{rank}").read_text().splitlines() for rank in range(num_ranks)
        ]
    assert masks["stopped"] == masks["whole"]
    assert_same_state(tmp_path / "stopped-run", tmp_path / "whole-run")
    drawn = [mask for of_rank in masks["whole"] for mask in of_rank]
    assert len(drawn) == len(set(drawn)) == 12 * num_ranks


# The end of a run


@pytest.mark.parametrize(
    ("script", "last", "epoch", "step"),
    [
        ("train_ddp.py", "max_steps=11", 1, 11),
        ("train_accumulate.py", "epochs=1", 1, 8),
    ],
)
def test_a_run_stopped_in_its_last_step_is_validated_when_it_is_started_again(
    script: str, last: str, epoch: int, step: int, runs, data, tmp_path
) -> None:
    run, here = tmp_path / "run", f"step == {step} and rank == 0 and os.kill(os.getpid(), 15)"
    folder = script_with(tmp_path / "s", script, here)
    options = [*data, last, "resume=auto"]
    codes, prints = run_to_end(script, run, *options, folder=folder)
    assert set(codes) == {EXIT_CODE}, prints
    assert f"stopped by a signal: saved at step {step}" in prints[0]
    assert not (run / "summary.json").exists()
    assert (run / "requeue").exists()

    train(script, run, *options)
    whole = runs(script, last)
    assert_same_state(run, whole)
    assert not (run / "requeue").exists()
    summary = summary_of(run)
    assert summary["steps"] == step
    assert scalars_of(run, "val/loss") == scalars_of(whole, "val/loss")
    for name in ("val/loss", "val/top1", "best"):
        assert summary[name] == summary_of(whole)[name]

    again = train(script, run, *options)
    key, value = last.split("=")
    line = next(line for line in again.splitlines() if line.startswith("nothing to do: "))
    assert f"epoch {epoch} (step {step})" in line
    assert f"{key}={value}" in line
    assert summary_of(run) == summary
    assert checkpoint_of(run)["step"] == step
    for name in ("val/loss", "val/top1", "best", "steps"):
        assert summary_of(run)[name] == summary[name]

    further = train(script, run, *data, "epochs=3", f"max_steps={step + 1}", "resume=auto")
    assert "nothing to do" not in further
    assert checkpoint_of(run)["step"] == step + 1


# Layouts in memory


@pytest.mark.parametrize(
    ("optimizer", "then"), [([*SGD], "true"), (["optimizer=adamw"], "false")], ids=["sgd", "adamw"]
)
def test_the_layout_of_the_weights_may_change_when_a_run_goes_on(
    optimizer: list[str], then: str, runs, data, tmp_path
) -> None:
    """The optimizer's values stay with the weights that they belong to."""
    now = "false" if then == "true" else "true"
    options, run = [*data, *PLAIN, *optimizer], tmp_path / "run"
    train("train.py", run, *options, f"model.channels_last={then}", "max_steps=6")
    train("train.py", run, *options, f"model.channels_last={now}", "max_steps=7", "resume=auto")
    whole = runs("train.py", *PLAIN, *optimizer, f"model.channels_last={then}", "max_steps=7")
    assert difference(run, whole) < 1e-5
    first, second = (checkpoint_of(path)["optimizer"]["state"] for path in (run, whole))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


# One process


def test_a_script_of_one_process_asks_nobody(data, tmp_path) -> None:
    folder = folder_with(tmp_path / "s", "train.py")
    head = """
import torch.distributed as dist

def fail(*unused, **also_unused):
    raise AssertionError("asked torch.distributed")

for name in ("is_initialized", "get_rank", "get_world_size", "all_reduce", "barrier", "broadcast"):
    setattr(dist, name, fail)
"""
    path = folder / "train.py"
    path.write_text(head + path.read_text())
    codes, [text] = run_to_end(
        "train.py", tmp_path / "run", *data, "checkpoint.every_steps=3", folder=folder
    )
    assert codes == [0], text
    assert summary_of(tmp_path / "run")["steps"] == 3 * PER_EPOCH
