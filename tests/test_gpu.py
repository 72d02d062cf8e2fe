"""What a CUDA device does: `python -m pytest -m gpu` on a machine with one.

Where it can, a test runs on the CPU too, which shows that what is left to doubt is CUDA.
"""

import os
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.amp import GradScaler, autocast

from loaders.image_loaders import build_loaders
from models import build_model
from runtime import build_optimizer
from runtime.guard import NonFiniteGuard
from runtime.setup import resolve_device, set_numerics
from tasks import build_task
from tests.faults import assert_same_state, script_with, wait_for_step
from tests.helpers import (
    DEVICES,
    ENVIRONMENT,
    NEEDS_CUDA,
    REPOSITORY,
    SCRIPTS,
    checkpoint_of,
    has_ranks,
    make_config,
    summary_of,
    values_of,
)
from tests.images import save, save_tiff
from tests.torchrun import TWO_RANKS, Torchrun

gpu = partial(pytest.param, marks=NEEDS_CUDA)
on_each_device = pytest.mark.parametrize("device", DEVICES)
on_cuda = pytest.mark.parametrize("device", DEVICES[1:])
TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank"
)

STEPS = ["max_steps=20", "log.every_steps=1", "epochs=1", "optimizer=sgd", "optimizer.lr=0.01"]
STEPS += ["fp32_precision=ieee"]  # with tf32, losses differ by more than any technique changes them
BUSY_CYCLES = 20_000_000  # about 10 ms of a GPU


# Batches

SIDE = 40  # pixels


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """photos, pairs, masks: JPEGs with halved colours, as cameras write them, and sharp coloured
    edges, masks as PNGs; uint8, uint16, raw: TIFFs of 5 channels, the former two compressed."""
    root, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for number in range(12):
        coarse = random.integers(0, 256, (6, 8, 3)).astype(np.uint8)
        photo = Image.fromarray(coarse).resize((118 + number, 94), Image.Resampling.BICUBIC)
        for folder in (f"photos/class{number % 2}", "pairs/input", "pairs/target", "masks/images"):
            save(root / folder / f"{number:02d}.jpg", photo, quality=92, subsampling="4:2:0")
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        mask = random.integers(0, 4, photo.size[::-1]).astype(np.uint8)
        save(root / "masks/masks" / f"{number:02d}.png", mask)
        for name, dtype, compression in (
            ("uint8", np.uint8, "zlib"),
            ("uint16", np.uint16, "zlib"),
            ("raw", np.uint16, None),
        ):
            folder = root / name / f"class{number % 2}"
            pixels = random.integers(0, np.iinfo(dtype).max + 1, (SIDE, SIDE, 5)).astype(dtype)
            save_tiff(folder / f"{number:02d}.tif", pixels, compression=compression)
    return root


CUT = ["data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]
JITTER = "data.colour_jitter=[0.4,0.4,0.4]"
DATA = {
    "photos": ["data=imagefolder", "data.resize=72", "data.crop=[60,52]", *CUT],
    "photos, jittered": [
        *("data=imagefolder", "data.resize=null", "data.crop=[48,56]", JITTER),
        *("data.random_resized_crop=[0.3,1]", "model.channels_last=true"),
    ],
    "photos, mixed": [
        *("data=imagefolder", "data.resize=72", "data.crop=[60,52]", "data.rotation=20"),
        *("data.gaussian_blur=[0.5,0.1,2]", "data.random_erasing=0.5"),
        *("data.mixup=0.4", "data.cutmix=1"),
    ],
    "pairs": ["data=pairs", "data.resize=64", "data.crop=[48,48]", *CUT],
    "masks": [
        *("data=masks", "data.resize=72", "data.crop=[56,48]", *CUT, "data.num_classes=4"),
        *("task=segmentation", "model=unet", "model.kwargs.width=4"),
    ],
    "uint8": ["data=cells", "data.resize=null", f"data.crop=[{SIDE},{SIDE}]", "data.hflip=0.5"],
    "uint8, enlarged": ["data=cells", "data.resize=60", "data.crop=[56,56]", *CUT],
    "uint16": ["data=cells", "data.resize=null", "data.crop=[32,24]", *CUT],
    "uint16, jittered": [
        *("data=cells", "data.resize=60", "data.crop=[56,56]", JITTER, "model.channels_last=true"),
    ],
    "raw": ["data=cells", "data.resize=null", "data.crop=[32,24]", *CUT],
}
LOADERS = {
    "threads": ["loader=pytorch"],
    "processes": ["loader=pytorch", "loader.num_workers=2", "loader.num_threads=1"],
    "dali": ["loader=dali"],
    "dali, no hardware": ["loader=dali", "loader.hw_decoder_load=0"],
    "dali, only hardware": ["loader=dali", "loader.hw_decoder_load=1"],
}


# Those of the CPU are compared in other files; two of them show that this test is right.
BATCHES: list[Any] = [("photos, jittered", "processes", "cpu"), ("masks", "dali", "cpu")]
BATCHES += [
    gpu(name, loader, "cuda")
    for name in DATA
    for loader in LOADERS
    if "hardware" not in loader or name.startswith("photos")
]


@pytest.mark.parametrize(("name", "loader", "device"), BATCHES)
def test_batches_are_those_of_the_cpu(
    name: str, loader: str, device: str, data: Path, tmp_path: Path
) -> None:
    """For two epochs, while the device is late: no memory of a batch is used again too early."""
    options = reading(name, data, tmp_path, "data.mean=null", "data.std=null")
    expected = batches_of([*options, "loader=pytorch"], "cpu")
    got = batches_of([*options, *LOADERS[loader]], device)
    assert len(got) == len(expected) == 10
    is_decoded_otherwise = loader.startswith("dali") and name[0] in "pm"  # JPEGs
    most, mean = (16 / 255, 1 / 255) if is_decoded_otherwise else (2e-4, 1e-5)
    for one, other in zip(got, expected, strict=True):
        for part, reference in zip(one, other, strict=True):
            assert part.shape == reference.shape
            assert part.dtype == reference.dtype
            difference = (part.double() - reference.double()).abs()
            assert difference.max() <= most
            assert difference.mean() <= mean


def reading(name: str, data: Path, tmp_path: Path, *more: str) -> list[str]:
    """The options of a row of DATA, in batches of two."""
    root = f"data.root={data / name.split(',')[0]}"
    sizes = ["global_batch_size=2", "data.val_count=2"]
    return [*DATA[name], root, f"data.cache_dir={tmp_path}", *sizes, *more]


def batches_of(options: list[str], device: str) -> list[tuple[Tensor, ...]]:
    """Copies of two epochs' batches, made by a training stream that lags behind."""
    train, _ = build_loaders(make_config(*options), resolve_device(device))
    copies = []
    for epoch in range(2):
        train.set_epoch(epoch)
        for batch in train:
            if device == "cuda":
                torch.cuda._sleep(BUSY_CYCLES)
            copies.append(tuple(part.clone() for part in batch))
    return [tuple(part.cpu() for part in batch) for batch in copies]


@on_each_device
@pytest.mark.parametrize("loader", ["threads", "dali"])
def test_a_file_that_is_cut_short_is_skipped(loader: str, device: str, data, tmp_path) -> None:
    photos = shutil.copytree(data / "photos", tmp_path / "photos")
    bad = photos / "class1" / "03.jpg"
    bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])
    options = reading("photos", tmp_path, tmp_path, *LOADERS[loader], "data.on_error=skip")
    splits = build_loaders(make_config(*options), resolve_device(device))
    num_images = sum(len(inputs) for split in splits for inputs, _ in split)
    [reason] = {r for found in splits[0].state_dict()["bad"] for r in found.values()}
    assert "03.jpg" in reason
    assert num_images in (11, 12)  # training takes another one instead


# Steps

CONFIG = ["loader=synthetic", "global_batch_size=8", "optimizer.lr=0.01"]


def built(device: str, *overrides: str) -> tuple[Any, ...]:
    """Configuration, loader, task, model, optimizer and schedule, as the scripts build them."""
    cfg = make_config(*CONFIG, *overrides)
    set_numerics(cfg)
    where = resolve_device(device)
    train, _ = build_loaders(cfg, where)
    task = build_task(cfg, train)
    model = build_model(cfg.model, train.in_channels, task.num_outputs).to(where)
    return cfg, train, task, model, *build_optimizer(cfg, model, len(train))


@on_each_device
@pytest.mark.parametrize(
    ("optimizer_name", "precision"),
    [("sgd", "float32"), ("adamw", "float16"), ("adamw", "bfloat16")],
)
def test_a_batch_of_nan_leaves_weights_and_statistics_untouched(
    optimizer_name: str, precision: str, device: str
) -> None:
    cfg, loader, task, model, optimizer, _ = built(device, f"optimizer={optimizer_name}")
    guard = NonFiniteGuard(cfg, model, optimizer, loader)
    is_half = precision == "float16"
    scaler = GradScaler(device, init_scale=1.0, growth_interval=1000, enabled=is_half)
    inputs, targets = next(iter(loader))

    def step(inputs: Tensor) -> dict[str, Tensor]:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        dtype = getattr(torch, precision)
        with autocast(device, dtype, enabled=dtype != torch.float32):
            outputs = model(inputs)
        scaler.scale(task.loss(outputs, targets)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad_norm)
        guard.check(norm, scaler if is_half else None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return before

    def changed(before: dict[str, Tensor]) -> set[str]:
        return {name for name, now in model.state_dict().items() if not now.equal(before[name])}

    assert changed(step(inputs)) == set(model.state_dict())
    assert changed(step(inputs * torch.nan)) == set()
    assert changed(step(inputs)) == set(model.state_dict())
    guard.settle()
    assert guard.num_bad_steps == 1


@on_cuda
@pytest.mark.parametrize("loader", ["threads", "processes", "dali"])
def test_forty_short_epochs_need_no_more_memory(
    loader: str, device: str, data: Path, tmp_path: Path
) -> None:
    options = reading("photos, jittered", data, tmp_path, "model.kwargs.width=4", *LOADERS[loader])
    _, train, task, model, optimizer, _ = built(device, *options)
    reserved = []
    for epoch in range(40):
        train.set_epoch(epoch)
        for inputs, targets in train:
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[10]


# Runs


def run(
    device: str,
    script: str,
    output_dir: Path,
    *overrides: str,
    num_ranks: int = 1,
    folder: Path = REPOSITORY,
) -> dict[str, Any]:
    """The summary of an entry point's run, with NCCL unless the overrides say otherwise."""
    command = [sys.executable]
    if has_ranks(script):
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += [script, f"output_dir={output_dir}", f"device={device}", *STEPS, *overrides]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    return summary_of(output_dir)


@on_cuda
@pytest.mark.parametrize(
    ("script", "loader", "name"),
    [
        *(("train.py", loader, "photos, jittered") for loader in LOADERS if "," not in loader),
        ("train.py", "dali", "masks"),
        ("train_ema.py", "dali", "photos"),
    ],
)
def test_no_step_waits_for_the_device(
    script: str, loader: str, name: str, device: str, data: Path, tmp_path: Path
) -> None:
    """But the first two of the run, those of log points and the first of an epoch, of five."""
    mode = "'error' if step > 2 and step % 5 > 1 else 'default'"
    lines = "from torch import cuda", f"cuda.set_sync_debug_mode({mode})"
    folder = script_with(tmp_path / "s", script, *lines)
    options = reading(name, data, tmp_path, *LOADERS[loader], "log.every_steps=5", "epochs=3")
    assert run(device, script, tmp_path / "run", *options, folder=folder)["steps"] == 15


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Path:
    """The folder of a run of `train.py`."""
    folder = tmp_path_factory.mktemp("baseline") / "run"
    run("cuda", "train.py", folder)
    return folder


@on_cuda
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_entry_point_runs_with_dali(script: str, device: str, tmp_path) -> None:
    summary = run(device, script, tmp_path / "run", "loader=dali", "max_steps=3")
    assert summary["device"].startswith("cuda")


@on_cuda
@pytest.mark.parametrize(
    ("script", "override", "tolerance"),
    [
        ("train_ddp.py", "seed=0", 2e-3),
        ("train_ddp.py", "distributed.backend=gloo", 2e-3),
        ("train_fsdp.py", "seed=0", 2e-3),
        ("train.py", "loader=dali", 2e-3),
        ("train.py", "model.compile=true", 5e-3),
        ("train.py", "model.channels_last=true", 5e-3),
        ("train_amp.py", "amp.dtype=bfloat16", 0.05),
        ("train_amp.py", "amp.init_scale=1024", 0.05),  # float16
    ],
)
def test_it_trains_like_the_baseline(
    script: str, override: str, tolerance: float, device: str, baseline: Path, tmp_path
) -> None:
    """Scripts with ranks do so on all GPUs, or as many of them as divide the batch; two of gloo
    share one GPU, which NCCL refuses. SyncBatchNorm sees the global batch."""
    num_ranks = 2 ** (torch.cuda.device_count().bit_length() - 1)
    if "gloo" in override:
        device, num_ranks = "cuda:0", 2
    output = tmp_path / "run"
    run(device, script, output, override, num_ranks=num_ranks)
    expected = values_of(baseline, "train/loss")
    assert values_of(output, "train/loss") == pytest.approx(expected, abs=tolerance)
    if script == "train_ddp.py":
        one, other = (checkpoint_of(folder)["model"] for folder in (baseline, output))
        for name in one:
            if "running" in name:
                assert torch.allclose(one[name], other[name], atol=1e-3), name


@on_cuda
@TWO_GPUS
def test_a_rank_that_hangs_under_nccl_is_named(device: str, tmp_path) -> None:
    hang = "if (step, rank) == (3, 1): time.sleep(1000)"
    folder = script_with(tmp_path / "s", "train_ddp.py", hang)
    with on_gpus(folder, tmp_path / "run", *STEPS, "distributed.timeout_s=10") as torchrun:
        assert torchrun.wait() != 0
    assert "missing: rank 1. Where each rank stood:" in torchrun.text()
    record = pickle.loads((tmp_path / "run" / "flight_record_rank_0").read_bytes())
    names = [entry["profiling_name"] for entry in record["entries"]]
    assert any(name.startswith("nccl") and "all_reduce" in name for name in names)


def on_gpus(
    folder: Path, output_dir: Path, *overrides: str, launcher: list[str] = TWO_RANKS
) -> Torchrun:
    """train_ddp.py with sight of the GPUs; not forked, since torchrun itself uses CUDA."""
    all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or all_gpus
    shown = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": visible}
    command = [*launcher, "train_ddp.py", f"output_dir={output_dir}", *overrides]
    return Torchrun(command, folder, output_dir.with_suffix(".txt"), env=shown, is_forked=False)


@on_cuda
def test_a_killed_rank_comes_back(device: str, tmp_path) -> None:
    shared = ["device=cuda:0", "distributed.backend=gloo", "checkpoint.every_steps=1"]
    output = tmp_path / "run"
    folder = script_with(tmp_path / "s", "train_ddp.py", "time.sleep(0.1)")
    launcher = [*TWO_RANKS, "--max-restarts=3"]
    with on_gpus(folder, output, *STEPS, *shared, "resume=auto", launcher=launcher) as torchrun:
        wait_for_step(output, 3)
        torchrun.rank(1).kill()
        assert torchrun.wait() == 0, torchrun.text()
    assert "resumed from" in torchrun.text()
    assert summary_of(output)["steps"] == 20


@on_cuda
@pytest.mark.parametrize("loader", ["pytorch", "dali"])
def test_a_resumed_run_has_the_same_bits(loader: str, device: str, tmp_path) -> None:
    options = [f"loader={loader}", "deterministic=true", JITTER, "epochs=2", "optimizer=adamw"]
    run(device, "train.py", tmp_path / "whole", *options, "max_steps=6")
    for steps in (3, 6):
        run(device, "train.py", tmp_path / "parts", *options, f"max_steps={steps}", "resume=auto")
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


@on_cuda
def test_float16_is_the_default_and_finds_its_scale(device: str, tmp_path) -> None:
    summary = run(device, "train_amp.py", tmp_path / "run", f"amp.init_scale={2.0**24}")
    assert (summary["precision"], summary["bad_steps"]) == ("float16", 0)
    assert checkpoint_of(tmp_path / "run")["scaler"]["scale"] < 2**24


@on_cuda
@pytest.mark.parametrize("then", ["true", "false"])
def test_the_layout_of_the_weights_may_change_when_a_run_goes_on(
    then: str, device: str, tmp_path
) -> None:
    now = "false" if then == "true" else "true"
    options = ["model.kwargs.batch_norm=false"]
    for folder, layout, steps in (("whole", then, 7), ("run", then, 6), ("run", now, 7)):
        changes = [f"model.channels_last={layout}", f"max_steps={steps}", "resume=auto"]
        run(device, "train.py", tmp_path / folder, *options, *changes)
    one, two = (checkpoint_of(tmp_path / name)["model"] for name in ("whole", "run"))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
