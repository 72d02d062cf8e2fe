"""Loaders on one GPU: ResNet-50, AlexNet and the loaders alone, the template's beside plain code.

    python -m benchmarks gpu                                at most 5 minutes
    python -m benchmarks gpu rows=dali,constant seconds=5   rows whose names have one of these words

All rows run in one process and in the same loop, so that they differ by their loader only; those of
`train_amp.py` show what the template's own loop costs. Each row is written as soon as it is known.
A row with DALI is a failed one if the CPU decoded its JPEGs. Without a GPU it is a dry run.
"""

import gc
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast

from benchmarks import REPOSITORY
from benchmarks.entry_points import WAIT
from benchmarks.gpu_loaders import DRY, DRY_DATA, MODELS, Sizes, Source, photos, prepare, sources
from benchmarks.records import Subject
from benchmarks.run import SPEED, Run, now
from benchmarks.step import timed
from benchmarks.template import make_config
from runtime.gpu_monitor import GpuMonitor
from runtime.setup import set_numerics
from runtime.timing import Timing

LIMIT_S, ROW_LIMIT_S = 300, 60  # of all rows and of one
SCRIPTS = (("AlexNet", "synthetic", 300), ("AlexNet", "dali", 300), ("ResNet-50", "pytorch", 80))
BUSY, PEAK = "GPU utilisation", "peak memory"
FIGURES = {
    "perf/images_per_s": (SPEED, "images/s"),
    "perf/data_wait_share": (WAIT, "%"),
    "perf/gpu_utilization": (BUSY, "%"),
    "perf/peak_memory_gib": (PEAK, "GiB"),
}
"""Figures of a run's summary; shares in [0, 1] become %."""

Found = dict[tuple[str, str], list[float]]
"""Figures of a row, by (quantity, unit)."""


def main(run: Run, limit_s: float = LIMIT_S) -> None:
    """Measure the rows whose names contain one of `run.rows`.

    Raises:
        RuntimeError: rows failed, or there was no time left for them.
    """
    sizes = Sizes()
    if run.device.type == "cpu":
        sizes, run = DRY, replace(run, sizes=replace(run.sizes, data=DRY_DATA))
    sizes = replace(sizes, seconds=run.seconds or sizes.seconds)
    set_numerics(make_config(*run.overrides))
    signal.signal(signal.SIGALRM, stop_row)
    date, end, failed = now(), time.monotonic() + limit_s, []

    def chosen(case: str, subject: Subject) -> bool:
        name = f"{case}, {subject}".lower()
        return not run.rows or any(word.lower() in name for word in run.rows)

    def record(case: str, subject: Subject, unit: str, measure: Callable[[], Any]) -> None:
        found: Found = {}
        note = "not measured: no time left"
        if time.monotonic() < end:
            signal.alarm(ROW_LIMIT_S)
            try:
                found, note = measure()
            except Exception as error:
                note = f"failed: {type(error).__name__}: {error}"[:400]
            signal.alarm(0)
        if not found:
            failed.append(f"{case}, {subject}")
        run.record("gpu", case, subject, found or {(SPEED, unit): []}, note=note, date=date)

    found = sources(run, sizes)
    for source in found:
        source.rows = tuple(r for r in source.rows if chosen(source.case(r), source.subject))
    scripts = SCRIPTS if run.device.type == "cuda" else [(*SCRIPTS[0][:2], 3)]
    scripts = [one for one in scripts if chosen(one[0], script_name(one[1]))]
    if not any(source.rows for source in found) and not scripts:
        sys.exit(f"rows={','.join(run.rows)}: in no row's name; use rows=dali,alone, for example")
    for name in dict.fromkeys(source.data for source in found if source.rows):
        try:
            prepare(run, sizes, name)
        except Exception:  # its rows will fail
            traceback.print_exc()
    for source in found:
        for row in source.rows:
            measure = partial(measured, run.device, sizes, source, row)
            record(source.case(row), source.subject, source.unit, measure)
        source.batches = None  # ends its workers or pipeline
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    for model, loader, steps in scripts:
        measure = partial(script, run, sizes, model, loader, steps)
        record(model, script_name(loader), "images/s", measure)
    if failed:
        raise RuntimeError(f"rows without a figure: {'; '.join(failed)}")


def script_name(loader: str) -> Subject:
    return Subject(f"train_amp.py loader={loader}")


def stop_row(*_: object) -> None:
    raise TimeoutError(f"it took more than {ROW_LIMIT_S} s")


def measured(device: torch.device, sizes: Sizes, source: Source, row: str) -> tuple[Found, str]:
    """Figures of a row, and what decoded its images."""
    batches, on_gpu = source.start(device), device.type == "cuda"
    step = training(row, device) if row in MODELS else None
    timing = Timing(device)
    for _ in range(sizes.warm_up):
        batch = next(batches)
        if step:
            step(*batch)
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    gpu = GpuMonitor(device)
    gpu.start()
    end = time.perf_counter() + sizes.seconds
    for number, batch in enumerate(timed(batches, timing)):
        if step:
            step(*batch)
        elif on_gpu and number % 4 == 0:  # nothing else keeps the host from running ahead
            torch.cuda.synchronize(device)
        if number > 2 and time.perf_counter() > end:
            break
    if on_gpu:
        torch.cuda.synchronize(device)
    timing.finished()
    gpu.stop()
    is_right, decoder = source.decoder
    if not is_right:
        raise RuntimeError(f"decoded on the CPU, at {timing.images_per_s:.0f}/s: {decoder}")
    found: Found = {(SPEED, source.unit): [timing.images_per_s], **figures(gpu.values())}
    if step:
        found[WAIT, "%"] = [100 * timing.data_wait_share]
    return found, decoder


def figures(values: dict[str, Any]) -> Found:
    """Those of a run's summary that tables show."""
    known = {what: values[key] for key, what in FIGURES.items() if key in values}
    return {what: [value * (100 if what[1] == "%" else 1)] for what, value in known.items()}


def training(name: str, device: torch.device) -> Callable[..., None]:
    """Step of a bare training loop, which unscales the gradients and measures their norm."""
    import torchvision

    on_gpu, model = device.type == "cuda", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if on_gpu:
        with device:
            model = getattr(torchvision.models, MODELS[name])(num_classes=2)
    else:
        model.append(nn.Linear(3, 2))
    model.to(memory_format=torch.channels_last).train()
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4, "fused": on_gpu}
    optimizer = torch.optim.SGD(model.parameters(), 0.01, **options)
    scaler = GradScaler(device.type, enabled=on_gpu)

    def step(inputs: Tensor, targets: Tensor) -> None:
        inputs = inputs.to(memory_format=torch.channels_last)
        with autocast(device.type, torch.float16, enabled=on_gpu):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def script(run: Run, sizes: Sizes, model: str, loader: str, steps: int) -> tuple[Found, str]:
    """Figures of a run of `train_amp.py`, and its seconds by part."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = photos(run, sizes, "photos", f"loader={loader}", f"output_dir={folder}/run")
        overrides += ["optimizer=sgd", "optimizer.lr=0.01", f"max_steps={steps}"]
        if run.device.type == "cuda":
            overrides += ["model=torchvision", f"model.arch={MODELS[model]}"]
        command = [sys.executable, "train_amp.py", *overrides]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-300:])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    return figures(summary), ", ".join(
        f"{part} {s:.1f} s" for part, s in summary["seconds"].items()
    )
