"""What a CUDA device does: `python -m pytest -m gpu` on a machine with one.

Where it can, a test runs on the CPU too, which shows that what is left to doubt is CUDA.
"""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from loaders import build_loaders
from models import build_model
from runtime import build_optimizer
from runtime.setup import resolve_device
from tasks import build_task
from tests.helpers import (
    DEVICES,
    NEEDS_CUDA,
    REPOSITORY,
    SCRIPTS,
    folder_with,
    has_ranks,
    make_config,
)
from tests.images import FOLDERS, save, save_tiff
from tests.results import assert_same_state, checkpoint_of, summary_of, values_of
from tests.rows import rows

on_cuda = pytest.mark.parametrize("device", DEVICES[1:])

STEPS = ["max_steps=20", "log.every_steps=1", "epochs=1", "optimizer=sgd", "optimizer.lr=0.01"]
STEPS += ["fp32_precision=ieee"]  # with tf32, losses differ by more than any technique changes them


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """photos, pairs, masks: JPEGs with halved colours, as cameras write them, and sharp coloured
    edges, masks as PNGs; uint16: compressed TIFFs of 5 channels."""
    root, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for number in range(12):
        coarse = random.integers(0, 256, (6, 8, 3)).astype(np.uint8)
        photo = Image.fromarray(coarse).resize((118 + number, 94), Image.Resampling.BICUBIC)
        for folder in (f"photos/class{number % 2}", "pairs/input", "pairs/target", "masks/images"):
            save(root / folder / f"{number:02d}.jpg", photo, quality=92, subsampling="4:2:0")
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        mask = random.integers(0, 4, photo.size[::-1]).astype(np.uint8)
        save(root / "masks/masks" / f"{number:02d}.png", mask)
        deep = random.integers(65536, size=(40, 40, 5), dtype=np.uint16)
        path = root / "uint16" / f"class{number % 2}" / f"{number:02d}.tif"
        save_tiff(path, deep, compression="zlib")
    return root


CUT = ["data.random_crop=true", "data.hflip=0.5", "data.vflip=0.5"]
JITTER = "data.colour_jitter=[0.4,0.4,0.4]"
DATA = {
    "photos": [
        *(*FOLDERS, "data.resize=null", "data.crop=[48,56]", JITTER),
        *("data.random_resized_crop=[0.3,1]", "model.channels_last=true"),
    ],
    "photos, mixed": [
        *(*FOLDERS, "data.resize=72", "data.crop=[60,52]", *CUT, "data.rotation=20"),
        *("data.random_erasing=0.5", "data.mixup=0.4", "data.cutmix=1"),
    ],
    "pairs": ["data=pairs", "data.resize=64", "data.crop=[48,48]", *CUT],
    "masks": [
        *("data=masks", "data.resize=72", "data.crop=[56,48]", *CUT, "data.num_classes=4"),
        *("task=segmentation", "model=unet", "model.kwargs.width=4", "loss.weights=auto"),
    ],
    "uint16": ["data=cells", "data.resize=60", "data.crop=[56,56]", JITTER],
}
LOADERS = {
    "threads": ["loader=pytorch", "loader.num_workers=0"],
    "processes": ["loader=pytorch", "loader.num_workers=2", "loader.num_threads=1"],
    "dali": ["loader=dali"],
}


# Those of the CPU are compared in other files; one of them shows that this test is right.
BATCHES: list[Any] = rows(("uint16", "dali", "cpu"), needs="loader=dali")
BATCHES += [
    pytest.param(name, loader, "cuda", marks=NEEDS_CUDA)
    for name in DATA
    for loader in LOADERS
    if (name, loader) != ("masks", "dali")  # which DALI does not read
]


@pytest.mark.parametrize(("name", "loader", "device"), BATCHES)
def test_batches_are_those_of_the_cpu(name: str, loader: str, device: str, data: Path) -> None:
    """For two epochs, while the device is late: no memory of a batch is used again too early."""
    options = reading(name, data, "data.mean=null", "data.std=null")
    expected = batches_of([*options, "loader=pytorch"], "cpu")
    got = batches_of([*options, *LOADERS[loader]], device)
    assert len(got) == len(expected) == 10
    is_decoded_otherwise = loader.startswith("dali") and name[0] in "pm"  # JPEGs
    most, mean = (16 / 255, 1 / 255) if is_decoded_otherwise else (2e-4, 1e-5)
    for one, other in zip(got, expected, strict=True):
        for part, reference in zip(one, other, strict=True):
            torch.testing.assert_close(part, reference, rtol=0, atol=most)
            assert (part.double() - reference.double()).abs().mean() <= mean


def reading(name: str, data: Path, *more: str) -> list[str]:
    """The options of a row of DATA, in batches of two."""
    root = f"data.root={data / name.split(',')[0]}"
    sizes = ["global_batch_size=2", "data.val_count=2"]
    return [*DATA[name], root, f"data.cache_dir={data / 'cache'}", *sizes, *more]


def batches_of(options: list[str], device: str) -> list[tuple[Tensor, ...]]:
    """Copies of two epochs' batches, made by a training stream that lags behind."""
    train, _ = build_loaders(make_config(*options), resolve_device(device))
    copies = []
    for epoch in range(2):
        train.set_epoch(epoch)
        for batch in train:
            if device == "cuda":
                torch.cuda._sleep(20_000_000)  # noqa: SLF001 (cycles, about 10 ms)
            copies.append(tuple(part.clone() for part in batch))
    return [tuple(part.cpu() for part in batch) for batch in copies]


@on_cuda
def test_the_gpu_decodes_jpegs(device: str, data: Path) -> None:
    """Not the CPU, which would copy whole images: an image of 31 kB is a file of 3 kB."""
    sizes = ["data.resize=null", "data.crop=[90,116]"]
    options = reading("photos", data, *LOADERS["dali"], *sizes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        batches_of(options, device)
    names = {event.key for event in profiler.key_averages()}
    assert any("nvjpeg" in name.lower() for name in names), names


@on_cuda
@pytest.mark.parametrize("loader", LOADERS)
def test_forty_short_epochs_need_no_more_memory(loader: str, device: str, data: Path) -> None:
    cfg = make_config(*reading("photos", data, "model.kwargs.width=4", *LOADERS[loader]))
    train, _ = build_loaders(cfg, resolve_device(device))
    task = build_task(cfg, train)
    model = build_model(cfg.model, train.in_channels, task.num_outputs).to(device)
    optimizer, _ = build_optimizer(cfg, model, len(train))
    reserved = []
    for epoch in range(40):
        train.set_epoch(epoch)
        for inputs, targets in train:
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[10]


def run(
    device: str, script: str, output_dir: Path, *overrides: str, num_ranks=1, folder=REPOSITORY
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
        *(("train.py", loader, "photos") for loader in LOADERS),
        ("train.py", "threads", "masks"),
        ("train_ema.py", "dali", "photos"),
        ("train_recompute.py", "dali", "photos"),
    ],
)
def test_no_step_waits_for_the_device(script, loader, name, device, data, tmp_path) -> None:
    """But the first two of the run, those of log points and the first of an epoch, of five."""
    mode = "'error' if step > 2 and step % 5 > 1 else 'default'"
    lines = "from torch import cuda", f"cuda.set_sync_debug_mode({mode})"
    folder = folder_with(tmp_path / "s", script, loop=lines)
    options = reading(name, data, *LOADERS[loader], "log.every_steps=5", "epochs=3")
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
        ("train_recompute.py", "seed=0", 2e-3),
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


@on_cuda
@pytest.mark.parametrize("loader", ["pytorch", "dali"])
def test_a_resumed_run_has_the_same_bits(loader: str, device: str, tmp_path) -> None:
    options = [f"loader={loader}", "deterministic=true", JITTER, "epochs=2", "optimizer=adamw"]
    run(device, "train.py", tmp_path / "whole", *options, "max_steps=6")
    for steps in (3, 6):
        run(device, "train.py", tmp_path / "parts", *options, f"max_steps={steps}", "resume=auto")
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


WIDE = ["model.kwargs.width=64", "data.resize=64", "data.crop=64", "loader=synthetic"]
WIDE += ["global_batch_size=256", "optimizer=adamw", "deterministic=true", "epochs=1"]
FILL = """
    import torch as pt

    free, _ = pt.cuda.mem_get_info(device)
    ballast = pt.empty(free - (512 << 20), dtype=pt.uint8, device=device)
"""
"""Lines that leave a GPU 512 MiB, which one batch in training exceeds."""


@on_cuda
@pytest.mark.parametrize("script", ["train_accumulate.py", "train_ddp_accumulate.py"])
def test_a_full_card_takes_smaller_parts_to_the_same_bits(script, device, tmp_path) -> None:
    """Validation, whose batches are whole, has the memory back."""
    edits = [("    # your own: loggers, callbacks\n", FILL)]
    edits += [("        # validation\n", "        ballast = None\n\n")]
    folder = folder_with(tmp_path / "s", script, *edits)
    options = [*WIDE, "max_steps=3", "accumulate_margin=0"]
    auto, given = tmp_path / "auto", tmp_path / "given"
    run(device, script, auto, *options, "accumulate_steps=auto", folder=folder)
    number = checkpoint_of(auto)["progress"]["micro_batches"]["number"]
    assert number > 1
    run(device, script, given, *options, f"accumulate_steps={number}", folder=folder)
    assert_same_state(auto, given)


@on_cuda
def test_out_of_memory_on_a_gpu_is_told_with_a_snapshot(device: str, tmp_path) -> None:
    output = tmp_path / "run"
    loop = ["torch.empty(1 << 50, device='cuda')"]
    folder = folder_with(tmp_path / "s", "train.py", loop=loop)
    command = [sys.executable, "train.py", f"output_dir={output}", f"device={device}", *WIDE]
    command += ["profile.memory=true", "profile.steps=[0,9]"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "(train.py:" in last
    assert "accumulate_steps=auto" in last
    assert pickle.loads((output / "memory-rank0.pickle").read_bytes())["segments"]
