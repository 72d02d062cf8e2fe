"""Loaders on one GPU: ResNet-50, AlexNet and the loaders alone, the template's beside plain code.

    python -m benchmarks gpu                                at most 5 minutes
    python -m benchmarks gpu rows=dali,constant seconds=5   rows whose names have one of these words

All rows run in one process and in the same loop, so that they differ by their loader only; those of
`train_amp.py` show what the template's own loop costs. Each row is written as soon as it is known.
A row of DALI is a failed one if nvJPEG did not decode its JPEGs. Without a GPU it is a dry run.
"""

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast

from benchmarks import REPOSITORY
from benchmarks.baselines import optional
from benchmarks.cases import CASES
from benchmarks.generate import generate, link_often
from benchmarks.pipelines import PIL_PAIRS, TIFFFILE, Pipeline
from benchmarks.records import Subject
from benchmarks.run import SPEED, Run
from benchmarks.step import timed
from benchmarks.template import endless, make_config
from loaders import build_loaders
from loaders.pack import pack
from runtime.setup import set_numerics
from runtime.timing import Timing

LIMIT_S = 300
"""Time limit of all rows."""

ROW_LIMIT_S = 60
"""Time limit of a row."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ALONE = "loader alone"

Batches = Iterator[Any]
"""Endless tuples of tensors, the first of which is counted."""

Step = Callable[[Any], None]
Found = dict[tuple[str, str], list[float]]
"""Figures of a row by (quantity, unit)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes for a GPU."""

    batch_size: int = 256
    photos: int = 256
    """Different photos. Each is linked `copies` times, those of the pack `copies_packed` times, and
    pairs and cells `copies_small` times."""
    copies: int = 48
    copies_packed: int = 8
    copies_small: int = 8
    resize: int = 256
    crop: int = 224
    warm_up: int = 12
    """Steps before those that are measured."""
    script_steps: int = 300
    small_batch_size: int = 128
    """Batch size of pairs and cells."""
    seconds: float = 3.0
    """Measured seconds of a row."""


DRY = Sizes(4, 8, 2, 2, 2, 72, 64, 1, 3, 8, 0.01)
DRY_DATA = {"lowlight": 20, "cells": 80}


@dataclass
class Source:
    """A loader, from which one or more rows take their batches."""

    subject: Subject
    build: Callable[[], Iterable[Any]]
    data: str = "photos"
    models: tuple[str, ...] = (ALONE, "AlexNet", "ResNet-50")
    decodes_on_gpu: bool = False
    unit: str = "images/s"

    def case(self, model: str) -> str:
        return f"{ALONE}, {self.data}" if model == ALONE else model


class Sampler:
    """Utilisation in % of a GPU and of its JPEG engines, sampled in the background; empty without
    NVML."""

    def __init__(self, device: torch.device) -> None:
        self.gpu: list[int] = []
        self.jpeg: list[int] = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.sample, args=(device,), daemon=True)

    def __enter__(self) -> "Sampler":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()

    def sample(self, device: torch.device) -> None:
        with suppress(Exception):  # NVML is missing, or does not know the GPU or its JPEG engines
            nvml = optional("pynvml", "nvidia-ml-py")
            nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            while not self.done.wait(0.1):
                self.gpu.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                with suppress(nvml.NVMLError):
                    self.jpeg.append(nvml.nvmlDeviceGetJpgUtilization(handle)[0])

    def means(self) -> Found:
        found = {"GPU utilisation": self.gpu, "JPEG engines' utilisation": self.jpeg}
        # The first samples are from before the row.
        return {(k, "%"): [sum(v[3:]) / len(v[3:])] for k, v in found.items() if v[3:]}


def main(run: Run) -> None:
    """Measure all rows whose names contain one of `run.rows`."""
    sizes = Sizes()
    if run.device.type == "cpu":
        sizes, run = DRY, replace(run, sizes=replace(run.sizes, data=DRY_DATA))
    set_numerics(make_config(*run.overrides))
    end, failed = time.monotonic() + LIMIT_S, []
    signal.signal(signal.SIGALRM, stop_row)

    def row(
        case: str, subject: Subject, unit: str, measure: Callable[[], tuple[Found, str]]
    ) -> None:
        found: Found = {}
        note = "not measured: out of time"
        if time.monotonic() < end:
            signal.alarm(ROW_LIMIT_S)
            try:
                found, note = measure()
            except Exception as error:
                note = f"failed: {type(error).__name__}: {error}"[:400]
            finally:
                signal.alarm(0)
        if not found:
            failed.append(f"{case}, {subject}")
        run.record("gpu", case, subject, found or {(SPEED, unit): []}, note=note)

    chosen = sources(run, sizes)
    for source in chosen:
        source.models = tuple(
            m for m in source.models if is_chosen(run, source.case(m), source.subject)
        )
    prepare(run, sizes, dict.fromkeys(s.data for s in chosen if s.models))
    for source in chosen:
        batches = Opened(source, run.device)
        for model in source.models:
            measure = partial(measured, run, sizes, batches, model)
            row(source.case(model), source.subject, source.unit, measure)
        batches.close()
    for model, loader in (("AlexNet", "synthetic"), ("AlexNet", "dali"), ("ResNet-50", "pytorch")):
        subject = Subject(f"train_amp.py loader={loader}")
        if is_chosen(run, model, subject) and (sizes is not DRY or loader == "synthetic"):
            row(model, subject, "images/s", partial(script, run, sizes, model, loader))
    if failed:
        raise RuntimeError(f"{len(failed)} rows without a figure: {'; '.join(failed)}")


def stop_row(*_: object) -> None:
    raise TimeoutError(f"the row took more than {ROW_LIMIT_S} s")


def is_chosen(run: Run, case: str, subject: Subject) -> bool:
    name = f"{case}, {subject}".lower()
    return not run.rows or any(word.lower() in name for word in run.rows)


# Rows


class Opened:
    """The batches of a source, built when the first row needs them, and who decoded them."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self.batches: Batches | None = None
        self.decoder = ""

    def start(self) -> Batches:
        if self.batches is None:
            self.batches = on_device(self.source.build(), self.device)
            next(self.batches)
            if self.source.decodes_on_gpu and self.device.type == "cuda":
                self.decoder = decoder_of(self.batches, self.device)
        return self.batches

    def close(self) -> None:
        self.batches = None  # ends its workers and pipelines
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def on_device(batches: Iterable[Any], device: torch.device) -> Batches:
    """Batches as tuples on the device, endlessly."""
    while True:
        for batch in batches:
            parts = (batch,) if isinstance(batch, Tensor) else batch
            yield tuple(part.to(device, non_blocking=True) for part in parts)


def measured(run: Run, sizes: Sizes, opened: Opened, model: str) -> tuple[Found, str]:
    """Figures of a row, and who decoded."""
    device = run.device
    is_gpu = device.type == "cuda"
    batches = opened.start()
    step = wait_for(device) if model == ALONE else training(model, device)
    for _ in range(sizes.warm_up):
        step(next(batches))
    if is_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    timing = Timing(device)
    end = time.perf_counter() + (run.seconds or sizes.seconds)
    with Sampler(device) as sampler:
        for number, batch in enumerate(timed(batches, timing)):
            step(batch)
            if number > 2 and time.perf_counter() > end:
                break
        if is_gpu:
            torch.cuda.synchronize(device)
        timing.finished()
    found: Found = {(SPEED, opened.source.unit): [timing.images_per_s], **sampler.means()}
    if model != ALONE:
        found["data wait", "%"] = [100 * timing.data_wait_share]
    if is_gpu:
        found["peak memory", "GiB"] = [torch.cuda.max_memory_allocated(device) / 2**30]
    if opened.decoder.startswith("CPU"):
        raise RuntimeError(
            f"decoded by the {opened.decoder}, at {timing.images_per_s:.0f} images/s"
        )
    engines = found.get(("JPEG engines' utilisation", "%"), [0.0])[0]
    where = f"; JPEG engines busy for {engines:.0f} %" if opened.decoder else ""
    return found, opened.decoder + where


def wait_for(device: torch.device) -> Step:
    """Step without a model: the host waits for every fourth batch."""
    count = 0

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        if count % 4 == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def training(name: str, device: torch.device) -> Step:
    """Step of a bare training loop, which unscales the gradients and measures their norm."""
    import torchvision

    is_gpu = device.type == "cuda"
    with device:
        model: nn.Module = nn.Sequential(
            nn.Conv2d(3, 2, 9, 9), nn.AdaptiveMaxPool2d(1), nn.Flatten()
        )
        if is_gpu:
            model = getattr(torchvision.models, arch(name))(num_classes=2)
    model = model.to(memory_format=torch.channels_last).train()
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4, "fused": is_gpu or None}
    optimizer = torch.optim.SGD(model.parameters(), 0.01, **options)
    scaler = GradScaler(device.type, enabled=is_gpu)

    def step(batch: Any) -> None:
        inputs, targets = batch
        inputs = inputs.to(memory_format=torch.channels_last)
        with autocast(device.type, torch.float16, enabled=is_gpu):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def arch(model: str) -> str:
    return model.lower().replace("-", "")


def script(run: Run, sizes: Sizes, model: str, loader: str) -> tuple[Found, str]:
    """Figures of a run of `train_amp.py`."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = photos(run, sizes, "photos", f"loader={loader}", "model.channels_last=true")
        overrides += ["model=torchvision", f"model.arch={arch(model)}"] if sizes is not DRY else []
        overrides += ["optimizer=sgd", "optimizer.lr=0.01", f"max_steps={sizes.script_steps}"]
        overrides += [f"output_dir={folder}/run", "checkpoint.every_minutes=60"]
        command = [sys.executable, "train_amp.py", *overrides]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-300:])
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
    found: Found = {
        (SPEED, "images/s"): [summary["perf/images_per_s"]],
        ("data wait", "%"): [100 * summary["perf/data_wait_share"]],
    }
    return found, ", ".join(f"{part} {s:.1f} s" for part, s in summary["seconds"].items())


def decoder_of(batches: Batches, device: torch.device, count: int = 6) -> str:
    """What decodes the next JPEGs, as a trace of CUDA's kernels shows, with the bytes copied."""
    num_images = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            num_images += len(next(batches)[0])
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = {e["name"] for e in events if e.get("cat") == "kernel"}
    copied = [e["args"].get("bytes", 0) for e in events if "HtoD" in e.get("name", "")]
    detail = f"{sum(copied) / num_images / 1000:.0f} kB an image to the device"
    nvjpeg = [name for name in kernels if "nvjpeg" in name]
    if not kernels:
        return f"decoder unknown, no kernel in the trace; {detail}"
    if not nvjpeg:
        return f"CPU, no kernel of nvJPEG among {len(kernels)}; {detail}"
    by_cuda = any("idct" in name.lower() or "dct" in name.lower() for name in nvjpeg)
    return f"nvJPEG{' with CUDA kernels' if by_cuda else ''}; {detail}"


# Sources of batches


def photos(run: Run, sizes: Sizes, folder: str, *more: str) -> list[str]:
    """Overrides of the template's loaders for the photos in a folder."""
    root = folder_of(run)
    return [
        *("data=imagefolder", f"data.root={root / folder}", f"data.cache_dir={root / 'cache'}"),
        *(f"data.resize={sizes.resize}", f"data.crop=[{sizes.crop},{sizes.crop}]"),
        *("data.random_crop=true", "data.hflip=0.5", f"data.val_count={sizes.batch_size}"),
        *(f"global_batch_size={sizes.batch_size}", *more, *run.overrides),
    ]


def prepare(run: Run, sizes: Sizes, names: Iterable[str]) -> None:
    """Generate images once, in `data/bench`, and link them often for long epochs."""
    root = folder_of(run)
    for name in names:
        if name == "photos":
            generate("caltech256", root / "images", sizes.photos, num_classes=2)
            link_often(root / "images", root / "photos", sizes.copies)
            link_often(root / "images", root / "few photos", sizes.copies_packed)
        else:
            (source,) = (o for o in run.case_overrides(name) if o.startswith("data.root="))
            link_often(Path(source.partition("=")[2]), root / name, sizes.copies_small)


def folder_of(run: Run) -> Path:
    return run.data_dir / f"gpu-{run.device.type}"


def sources(run: Run, sizes: Sizes) -> list[Source]:
    """Loaders in the order of their rows."""
    root, workers = folder_of(run), max(1, run.num_cores - 2)
    both = ("AlexNet", "ResNet-50")
    found = [
        Source(Subject("constant batch"), partial(constant, run, sizes), models=both),
        Source(
            Subject("torchvision ImageFolder + DataLoader", workers),
            partial(image_folder, root / "photos", sizes, run.device, workers),
        ),
        Source(Subject("loader=synthetic"), partial(ours, run, sizes, "synthetic"), models=both),
        Source(Subject("loader=pytorch"), partial(ours, run, sizes, "pytorch")),
        Source(Subject("loader=packed"), partial(packed, run, sizes)),
        Source(
            Subject("minimal DALI", 0, workers),
            partial(minimal_dali, root / "photos", sizes, run.device, workers),
            decodes_on_gpu=True,
        ),
        Source(Subject("loader=dali"), partial(ours, run, sizes, "dali"), decodes_on_gpu=True),
    ]
    for name, plain in (("pairs", PIL_PAIRS), ("cells", TIFFFILE)):
        more = [f"data.root={root / name}", f"data.cache_dir={root / 'cache'}"]
        more.append(f"global_batch_size={sizes.small_batch_size}")
        pipeline = Pipeline(plain.name, plain.baseline, uses_processes=True, count=workers)
        options: dict[str, Any] = {
            "data": name,
            "models": (ALONE,),
            "unit": f"{CASES[name].unit}/s",
        }
        load: Callable[[], Any] = partial(pipeline.batches, run, CASES[name], more)
        found.append(Source(pipeline.subject(run), load, **options))
        for loader in ("pytorch", "dali"):
            load = partial(case_batches, run, name, f"loader={loader}", *more)
            on_gpu = loader == "dali" and name == "pairs"
            found.append(
                Source(Subject(f"loader={loader}"), load, decodes_on_gpu=on_gpu, **options)
            )
    return found


def constant(run: Run, sizes: Sizes) -> Batches:
    with run.device:
        inputs = torch.randn(sizes.batch_size, 3, sizes.crop, sizes.crop)
        targets = torch.randint(2, (sizes.batch_size,))
    inputs = inputs.to(memory_format=torch.channels_last)
    while True:
        yield inputs, targets


def ours(run: Run, sizes: Sizes, loader: str, folder: str = "photos", *more: str) -> Batches:
    options = photos(run, sizes, folder, f"loader={loader}", "model.channels_last=true", *more)
    return endless(build_loaders(make_config(*options), run.device)[0])


def packed(run: Run, sizes: Sizes) -> Batches:
    out = folder_of(run) / "packed"
    if not (out / "pack.json").exists():
        pack(make_config(*photos(run, sizes, "few photos")).data, out)
    return ours(run, sizes, "packed", "few photos", f"loader.pack={out}")


def case_batches(run: Run, name: str, *overrides: str) -> Batches:
    return endless(build_loaders(run.config(name, *overrides), run.device)[0])


def image_folder(root: Path, sizes: Sizes, device: torch.device, workers: int) -> Iterable[Any]:
    """torchvision's dataset and transforms, as in its examples."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.PILToTensor(), v2.Resize(sizes.resize, antialias=True), v2.RandomCrop(sizes.crop)]
    steps += [v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    return torch.utils.data.DataLoader(
        ImageFolder(str(root), v2.Compose([*steps, v2.Normalize(MEAN, STD)])),
        sizes.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )


def minimal_dali(root: Path, sizes: Sizes, device: torch.device, threads: int) -> Batches:
    """DALI as in its manual: its file reader, whole images, resizing, crop with normalisation."""
    from torchvision.datasets import ImageFolder

    dali = optional("nvidia.dali", "nvidia-dali-cuda120")
    fn, types = (optional(f"nvidia.dali.{name}", "nvidia-dali-cuda120") for name in ("fn", "types"))
    plugin = optional("nvidia.dali.plugin.pytorch", "nvidia-dali-cuda120")
    files, labels = map(list, zip(*ImageFolder(str(root)).samples, strict=True))
    is_gpu = device.type == "cuda"

    @dali.pipeline_def(
        batch_size=sizes.batch_size,
        num_threads=threads,
        device_id=(device.index or 0) if is_gpu else None,
        prefetch_queue_depth=2,
        seed=1,
    )
    def graph() -> Any:
        encoded, label = fn.readers.file(
            files=files, labels=labels, random_shuffle=True, name="reader"
        )
        images = fn.decoders.image(
            encoded, device="mixed" if is_gpu else "cpu", output_type=types.RGB
        )
        images = fn.resize(
            images, resize_shorter=sizes.resize, interp_type=types.INTERP_LINEAR, antialias=True
        )
        images = fn.crop_mirror_normalize(
            images,
            crop=(sizes.crop, sizes.crop),
            crop_pos_x=fn.random.uniform(range=[0.0, 1.0]),
            crop_pos_y=fn.random.uniform(range=[0.0, 1.0]),
            mirror=fn.random.coin_flip(),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        return images, label.gpu() if is_gpu else label

    iterator = plugin.DALIClassificationIterator(graph(), reader_name="reader", auto_reset=True)
    while True:
        for (batch,) in iterator:
            yield batch["data"], batch["label"].squeeze(1).long()
