"""Loaders on one GPU: ResNet-50, AlexNet and the loaders alone, the template's beside plain code.

All rows run in one process and in the same loop, so that they differ by their loader only; those of
`train_amp.py` show what the template's own loop costs. Each row is written as soon as it is known.
A row with DALI fails if the CPU decoded its JPEGs. Without a GPU it is a dry run.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.amp import GradScaler, autocast

from benchmarks import REPOSITORY
from benchmarks.baselines import Job, Recipe, dali, dataloader
from benchmarks.cases import CASES, pack, recipe_of
from benchmarks.compare import endless
from benchmarks.generate import generate, link_often
from benchmarks.records import Subject, num_cores, record
from benchmarks.tables import BUSY, SPEED, WAIT
from conf.cli import load_config
from conf.errors import UserError
from loaders import build_loaders

PEERS = {"nvidia.dali": "nvidia-dali-cuda120"}
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DATA = REPOSITORY / "data" / "bench" / f"gpu-{DEVICE.type}"
ALONE = "loader alone"
MODELS = {"AlexNet": "alexnet", "ResNet-50": "resnet50"}
BATCH_SIZE = 256 if ON_GPU else 4
NUM_PHOTOS, NUM_COPIES = (256, 200) if ON_GPU else (8, 8)
WORKERS = max(1, num_cores() - 2)
NUM_WARM_UP = 12 if ON_GPU else 1
RECIPE = Recipe(256, (224, 224)) if ON_GPU else Recipe(72, (64, 64))
SCRIPTS = [("AlexNet", "synthetic", 300), ("AlexNet", "dali", 300), ("ResNet-50", "pytorch", 80)]

Figures = dict[tuple[str, str], list[float]]
"""Values of a row, by (quantity, unit)."""


@dataclass
class Source:
    """A loader, which is built for each of its rows."""

    subject: Subject
    build: Callable[[], Iterable[Any]]
    """Returns batches: tensors, or tuples of these; endless, or iterable repeatedly."""
    rows: tuple[str, ...] = (f"{ALONE}, photos", *MODELS)
    decodes: bool = False
    """The GPU has to decode."""
    unit: str = "images/s"


def main(path: Path, words: list[str], seconds: float, overrides: list[str]) -> None:
    """Measure the rows whose names contain one of the words, and append them to a file.

    Raises:
        UserError: there are no such rows, or rows have failed.
    """
    rows: list[tuple[str, Subject, str, Callable[[], Figures]]] = []
    for source in sources(overrides):
        for case in source.rows:
            rows.append(
                (case, source.subject, source.unit, partial(measured, source, case, seconds))
            )
    for model, loader, steps in SCRIPTS if ON_GPU else [("AlexNet", "synthetic", 3)]:
        subject = Subject(f"train_amp.py loader={loader}")
        of_script = partial(script, model, loader, steps, overrides)
        rows.append((model, subject, "images/s", of_script))
    chosen = [
        row for row in rows if any(word.lower() in f"{row[0]}, {row[1]}".lower() for word in words)
    ]
    if not chosen:
        raise UserError(f"rows={','.join(words)}: in no row's name; use rows=dali,alone")
    prepare()
    failed = []
    for case, subject, unit, measure in chosen:
        figures: Figures = {(SPEED, unit): []}
        note = ""
        try:
            figures = measure()
        except Exception as error:  # the others go on
            note = f"failed: {type(error).__name__}: {error}"[:400]
            failed.append(f"{case}, {subject}")
        record(path, "gpu", case, subject, figures, note)
    if failed:
        raise UserError(f"rows without a figure: {'; '.join(failed)}; {path} has the reasons")


def prepare() -> None:
    """Generate photos once and link them often, for long epochs."""
    generate("caltech256", DATA / "images", NUM_PHOTOS, num_classes=2)
    link_often(DATA / "images", DATA / "photos", NUM_COPIES)
    link_often(DATA / "images", DATA / "few", 8)


def photos(folder: str, *more: str) -> list[str]:
    """Overrides that select the photos in a folder."""
    crop = RECIPE.crop or (0, 0)
    return [
        *("data=imagefolder", f"data.root={DATA / folder}", f"data.cache_dir={DATA / 'cache'}"),
        *(f"data.resize={RECIPE.resize}", f"data.crop=[{crop[0]},{crop[1]}]"),
        *("data.random_resized_crop=null", "data.random_crop=true"),
        *(f"data.val_count={BATCH_SIZE}", f"global_batch_size={BATCH_SIZE}"),
        *("model.channels_last=true", *more),
    ]


def sources(overrides: list[str]) -> list[Source]:
    """Loaders in the order of their rows."""
    plain = (DATA / "photos", RECIPE, BATCH_SIZE)
    folder = partial(dataloader.image_folder, *plain, WORKERS)
    minimal = partial(dali.with_labels, *plain, WORKERS, DEVICE)

    def ours(name: str, decodes: bool = False) -> Source:
        return Source(Subject(f"loader={name}"), partial(load, name, overrides), decodes=decodes)

    found = [
        Source(Subject("constant batch"), constant, tuple(MODELS)),
        Source(Subject("torchvision ImageFolder + DataLoader", WORKERS), folder),
        Source(Subject("loader=synthetic"), partial(load, "synthetic", overrides), tuple(MODELS)),
        *(ours("pytorch"), ours("packed")),
        Source(Subject("minimal DALI", 0, WORKERS), minimal, decodes=True),
        ours("dali", decodes=True),
    ]
    others = {"pairs": dataloader.pil_pairs, "cells": dataloader.tifffile_images}
    for name, baseline in others.items():
        rows, unit = (f"{ALONE}, {name}",), CASES[name].unit
        what = {"pairs": "PIL pairs + DataLoader", "cells": "tifffile + DataLoader"}[name]
        other = partial(load_other, name, baseline)
        found.append(Source(Subject(what, WORKERS), other, rows, unit=unit))
        for loader in ("pytorch", "dali"):
            batches = partial(load_case, name, f"loader={loader}", *overrides)
            decodes = (name, loader) == ("pairs", "dali")
            found.append(Source(Subject(f"loader={loader}"), batches, rows, decodes, unit))
    return found


def constant() -> Iterator[tuple[Tensor, Tensor]]:
    inputs = torch.randn(BATCH_SIZE, 3, *(RECIPE.crop or ()), device=DEVICE)
    targets = torch.randint(2, (BATCH_SIZE,), device=DEVICE)
    while True:
        yield inputs.contiguous(memory_format=torch.channels_last), targets


def load(loader: str, overrides: list[str]) -> Iterator[Any]:
    """Batches of photos from a loader of the template; the data is packed first if necessary."""
    chosen = photos("photos", f"loader={loader}", *overrides)
    if loader == "packed":
        folder = pack(photos("few", *overrides), DATA / "packed")
        chosen = photos("few", "loader=packed", f"loader.pack={folder}", *overrides)
    return endless(build_loaders(load_config(chosen), DEVICE)[0])


def load_case(name: str, *overrides: str) -> Iterator[Any]:
    chosen = [*CASES[name].prepare(DATA), *overrides]
    return endless(build_loaders(load_config(chosen), DEVICE)[0])


def load_other(name: str, baseline: Callable[[Job], Any]) -> Any:
    cfg = load_config(CASES[name].prepare(DATA))
    files, *targets = CASES[name].files(DATA)
    images = targets[0] if targets else []
    return baseline(Job(recipe_of(cfg), files, images, cfg.global_batch_size, WORKERS, DEVICE))


def on_device(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches as tuples on the device, endlessly."""
    while True:
        batch = None
        for batch in batches:
            parts = (batch,) if isinstance(batch, Tensor) else batch
            yield tuple(part.to(DEVICE, non_blocking=True) for part in parts)
        if batch is None:
            raise ValueError("no batch in an epoch")


def measured(source: Source, case: str, seconds: float) -> Figures:
    """Figures of a row."""
    batches = on_device(source.build())
    step = training(case) if case in MODELS else None
    for _ in range(NUM_WARM_UP):
        batch = next(batches)
        if step:
            step(*batch)
    if source.decodes and ON_GPU and not runs_nvjpeg(batches):
        raise RuntimeError("decoded on the CPU: no kernel of nvJPEG in a trace")
    number, waiting_s, start = 0, 0.0, time.perf_counter()
    with utilisation() as busy:
        while number < 3 or time.perf_counter() < start + seconds:
            before = time.perf_counter()
            batch = next(batches)
            waiting_s += time.perf_counter() - before
            if step:
                step(*batch)
            elif ON_GPU and number % 4 == 0:  # nothing else keeps the host from running ahead
                torch.cuda.synchronize()
            number += 1
        if ON_GPU:
            torch.cuda.synchronize()
        total_s = time.perf_counter() - start
    speed = number * len(batch[0]) / total_s
    figures: Figures = {(SPEED, source.unit): [speed]}
    if busy:
        figures[BUSY, "%"] = [sum(busy) / len(busy)]
    if step:
        figures[WAIT, "%"] = [100 * waiting_s / total_s]
    return figures


def runs_nvjpeg(batches: Iterator[Any]) -> bool:
    """Whether a trace of further batches, the first of which were decoded before, has kernels of
    nvJPEG; where the hardware decodes, they convert the colours."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(6):
            next(batches)
        torch.cuda.synchronize()
    names = [event.key for event in profiler.key_averages()]
    return not names or any("nvjpeg" in name for name in names)


@contextmanager
def utilisation() -> Iterator[list[float]]:
    """Add the GPU's utilisation in %, as NVML gives it, to a list, ten times a second."""
    found: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while ON_GPU and not ended.wait(0.1):
            found.append(torch.cuda.utilization())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def training(name: str) -> Callable[..., None]:
    """Step of a bare training loop, which unscales the gradients and measures their norm."""
    model: nn.Module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    if ON_GPU:
        with DEVICE:
            model = getattr(torchvision.models, MODELS[name])(num_classes=2)
    model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4, fused=ON_GPU)
    scaler = GradScaler(DEVICE.type, enabled=ON_GPU)

    def step(inputs: Tensor, targets: Tensor) -> None:
        inputs = inputs.to(memory_format=torch.channels_last)
        with autocast(DEVICE.type, torch.float16, enabled=ON_GPU):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def script(model: str, loader: str, steps: int, overrides: list[str]) -> Figures:
    """Figures of a run of `train_amp.py`."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = photos("photos", f"loader={loader}", f"output_dir={folder}/run", *overrides)
        chosen += ["optimizer=sgd", "optimizer.lr=0.01", f"max_steps={steps}"]
        if ON_GPU:
            chosen += ["model=torchvision", f"model.arch={MODELS[model]}"]
        command = [sys.executable, "train_amp.py", *chosen]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-300:])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    figures: Figures = {(SPEED, "images/s"): [summary["perf/images_per_s"]]}
    figures[WAIT, "%"] = [100 * summary["perf/data_wait_share"]]
    if ON_GPU:
        figures[BUSY, "%"] = [100 * summary["perf/gpu_utilization"]]
    return figures
