"""Loaders that `python -m benchmarks gpu` compares, and the images that they load."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import Recipe
from benchmarks.cases import CASES
from benchmarks.decoder import decoder_of
from benchmarks.generate import generate, link_often
from benchmarks.pipelines import PIL_PAIRS, TIFFFILE
from benchmarks.records import Subject
from benchmarks.run import Run
from benchmarks.template import endless, make_config
from loaders import build_loaders
from loaders.pack import pack

ALONE = "loader alone"
MODELS = {"AlexNet": "alexnet", "ResNet-50": "resnet50"}


@dataclass(frozen=True)
class Sizes:
    """Sizes on a GPU."""

    seconds: float = 3
    """Measured time of a row."""
    warm_up: int = 12
    """Steps before it."""
    batch_size: int = 256
    small_batch_size: int = 128
    """Batch size of pairs and cells."""
    photos: int = 256
    """Number of different photos."""
    copies: int = 200
    """Times that each photo is linked; others are linked 8 times."""
    resize: int = 256
    crop: int = 224


DRY = Sizes(0.01, 1, 4, 8, 8, 8, 72, 64)
DRY_DATA = {"lowlight": 20, "cells": 80}


@dataclass
class Source:
    """A loader, which is built when the first of its rows is measured."""

    subject: Subject
    build: Callable[[], Iterable[Any]]
    """Returns batches: tensors, or tuples of these; endless, or iterable repeatedly."""
    rows: tuple[str, ...] = (ALONE, *MODELS)
    data: str = "photos"
    decodes: bool = False
    """The GPU has to decode."""
    unit: str = "images/s"
    batches: Iterator[Any] | None = None
    decoder: tuple[bool, str] = (True, "")

    def case(self, row: str) -> str:
        return f"{ALONE}, {self.data}" if row == ALONE else row

    def start(self, device: torch.device) -> Iterator[Any]:
        """Batches as tuples on the device, endlessly."""
        if self.batches is None:
            self.batches = on_device(self.build(), device)
            next(self.batches)
            if self.decodes and device.type == "cuda":
                self.decoder = decoder_of(self.batches, device)
        return self.batches


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    while True:
        batch = None
        for batch in batches:
            parts = (batch,) if isinstance(batch, Tensor) else batch
            yield tuple(part.to(device, non_blocking=True) for part in parts)
        if batch is None:
            raise ValueError("no batch in an epoch")


def folder_of(run: Run) -> Path:
    return run.data_dir.absolute() / f"gpu-{run.device.type}"


def prepare(run: Run, sizes: Sizes, name: str) -> None:
    """Generate images once and link them often, for long epochs."""
    root = folder_of(run)
    if name == "photos":
        generate("caltech256", root / "images", sizes.photos, num_classes=2)
        link_often(root / "images", root / name, sizes.copies)
        link_often(root / "images", root / "few", 8)
    else:
        (source,) = (o for o in run.case_overrides(name) if o.startswith("data.root="))
        link_often(Path(source.partition("=")[2]), root / name, 8)


def photos(run: Run, sizes: Sizes, folder: str, *more: str) -> list[str]:
    """Overrides that select the photos in a folder."""
    root = folder_of(run)
    return [
        *("data=imagefolder", f"data.root={root / folder}", f"data.cache_dir={root / 'cache'}"),
        *(f"data.resize={sizes.resize}", f"data.crop=[{sizes.crop},{sizes.crop}]"),
        *("data.random_resized_crop=null", "data.random_crop=true"),
        f"data.val_count={sizes.batch_size}",
        *(f"global_batch_size={sizes.batch_size}", "model.channels_last=true", *more),
        *run.overrides,
    ]


def sources(run: Run, sizes: Sizes) -> list[Source]:
    """Loaders in the order of their rows."""
    from benchmarks.baselines import dali, dataloader  # torchvision: 11 s, in each worker, too

    root, workers = folder_of(run), max(1, run.num_cores - 2)
    plain = (root / "photos", Recipe(sizes.resize, (sizes.crop, sizes.crop)), sizes.batch_size)
    folder = Subject("torchvision ImageFolder + DataLoader", workers)
    minimal = Subject("minimal DALI", 0, workers)

    def ours(loader: str, **options: Any) -> Source:
        return Source(Subject(f"loader={loader}"), partial(load, run, sizes, loader), **options)

    found = [
        Source(Subject("constant batch"), partial(constant, run.device, sizes), tuple(MODELS)),
        Source(folder, partial(dataloader.image_folder, *plain, workers)),
        ours("synthetic", rows=tuple(MODELS)),
        ours("pytorch"),
        ours("packed"),
        Source(minimal, partial(dali.with_labels, *plain, workers, run.device), decodes=True),
        ours("dali", decodes=True),
    ]
    for name, pipeline in (("pairs", PIL_PAIRS), ("cells", TIFFFILE)):
        more = [f"data.root={root / name}", f"data.cache_dir={root / 'cache'}"]
        more.append(f"global_batch_size={sizes.small_batch_size}")
        pipeline = replace(pipeline, count=workers)
        unit = f"{CASES[name].unit}/s"
        batches: Any = partial(pipeline.batches, run, CASES[name], more)
        found.append(Source(pipeline.subject(run), batches, (ALONE,), name, False, unit))
        for loader in ("pytorch", "dali"):
            batches = partial(load_case, run, name, f"loader={loader}", *more)
            decodes = (name, loader) == ("pairs", "dali")
            subject = Subject(f"loader={loader}")
            found.append(Source(subject, batches, (ALONE,), name, decodes, unit))
    return found


def constant(device: torch.device, sizes: Sizes) -> Iterator[tuple[Tensor, Tensor]]:
    inputs = torch.randn(sizes.batch_size, 3, sizes.crop, sizes.crop, device=device)
    targets = torch.randint(2, (sizes.batch_size,), device=device)
    while True:
        yield inputs.contiguous(memory_format=torch.channels_last), targets


def load(run: Run, sizes: Sizes, loader: str) -> Iterator[Any]:
    """Batches of photos from a loader of the template; the data is packed first if necessary."""
    overrides = photos(run, sizes, "photos", f"loader={loader}")
    if loader == "packed":
        out = folder_of(run) / "packed"
        overrides = photos(run, sizes, "few", "loader=packed", f"loader.pack={out}")
        if not (out / "pack.json").exists():
            pack(make_config(*overrides).data, out)
    return endless(build_loaders(make_config(*overrides), run.device)[0])


def load_case(run: Run, name: str, *overrides: str) -> Iterator[Any]:
    return endless(build_loaders(run.config(name, *overrides), run.device)[0])
