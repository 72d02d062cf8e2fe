"""Our loaders beside all others that can be had: same files, same steps, same output, in one run.

Whatever is not installed is listed with the reason. Before a way of loading is timed, its centre
crops of validation images are compared with those of PIL.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.baselines import Recipe
from benchmarks.cases import WHOLE_IMAGES, Case, endless, loader_overrides
from benchmarks.loaders import baseline, decoding, files_of
from benchmarks.out_of_band import pack
from benchmarks.run import UNAVAILABLE, Draw, Run, Subject, draw_from, number
from loaders import build_loaders

MOST_COMPARED = 32  # images
# Mean absolute difference from PIL's pixels, of 255. Who cuts before resizing is off by a fraction of
# a pixel, which makes up to 7 in these sharp-edged images; another crop, a flip or swapped channels
# make more than 30.
TOLERANCE = 10.0
MOST_COPIED = 4000  # images
PIXELS = "pixel difference"


@dataclass(frozen=True)
class Way:
    """A module of `benchmarks.baselines` and how it is called."""

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its `batches()`."""

    by_processes: bool = True
    """Parallel by `num_workers` processes; else by `num_threads` threads."""

    own_format: bool = False
    """Converts the files first, into a folder that it is given."""

    def parallel(self, run: Run) -> dict[str, Any]:
        """The argument that lets it use all CPU cores of a device."""
        return {"num_workers" if self.by_processes else "num_threads": run.num_cores}


PHOTOS = [
    Way("PIL + DataLoader", "pil_imagefolder"),
    Way("torchvision v2 + DataLoader", "torchvision_v2"),
    Way("torchvision v2, uint8 batches", "torchvision_v2", {"uint8_batches": True}),
    Way("WebDataset", "webdataset_shards", own_format=True),
    Way("LitData", "litdata_chunks", own_format=True),
    Way("SPDL", "spdl_threads", by_processes=False),
    Way("SPDL around torchvision", "spdl_threads", {"own_decoder": False}, by_processes=False),
    Way("FFCV, JPEG mode", "ffcv_beton", by_processes=False, own_format=True),
    Way("minimal DALI", "dali_minimal", by_processes=False),
]
PAIRS = [
    Way("PIL pairs + DataLoader", "pil_pairs"),
    Way("DALI external source", "dali_external_source", by_processes=False),
]
CELLS = [
    Way("tifffile + DataLoader", "tifffile_cells"),
    Way("minimal DALI", "dali_minimal", {"channels": 5}, by_processes=False),
]


def main(run: Run) -> None:
    """Photographs, pairs, and five-channel TIFFs with and without resizing."""
    comparisons: list[tuple[str, str, list[Way], tuple[str, ...]]] = [
        ("caltech256", "JPEGs, resize 256, random crop 224", PHOTOS, ()),
        ("pairs", "pairs of JPEGs, resize 256, random crop 224", PAIRS, ()),
        ("cells", "5-channel TIFFs, reading only", CELLS, WHOLE_IMAGES),
        ("cells", "5-channel TIFFs, resize and crop", CELLS, ()),
    ]
    for name, title, ways, overrides in comparisons:
        for case in run.chosen(name):
            compare(run, case, title, ways, overrides)


def compare(run: Run, case: Case, title: str, ways: list[Way], overrides: tuple[str, ...]) -> None:
    """Compare the pixels of all ways and of our loaders, then measure them side by side."""
    loaders: dict[Subject, Callable[[bool], Iterable[Any]]] = {}
    for way in ways:
        subject = Subject(way.name, **way.parallel(run))
        loaders[subject] = partial(other_loader, run, case, way, overrides)
    for name in ("pytorch", "dali", "packed"):
        subject = Subject(f"loader={name}", num_threads=run.num_cores)
        loaders[subject] = partial(template_loader, run, case, name, overrides)
    builders: dict[Subject, Callable[[], Draw]] = {
        subject: partial(training, run, load) for subject, load in loaders.items()
    }
    if case.name != "cells":
        for limit, last_step in (("decoding alone", "decode"), ("decoding and resizing", "resize")):
            subject = Subject(f"limit: {limit}", num_threads=run.num_cores)
            builders[subject] = partial(decoding, run, case, last_step)
    if case.name == "caltech256":
        for as_float in (False, True):
            name = "limit: copying bytes" + (", to float32" if as_float else "")
            subject = Subject(name, num_threads=run.num_cores)
            builders[subject] = partial(copying, run, case, as_float)
    if not run.is_done("alternatives", title, builders):
        for subject, reason in wrong_pixels(run, case, title, loaders, overrides).items():
            builders[subject] = partial(refuse, reason)
    run.compare(
        "alternatives", title, builders, unit=f"{case.unit}/s", epoch_size=case.published_size
    )


def wrong_pixels(
    run: Run,
    case: Case,
    title: str,
    loaders: dict[Subject, Callable[[bool], Iterable[Any]]],
    overrides: tuple[str, ...],
) -> dict[Subject, str]:
    """Write down how much each loader's images for validation differ from those of the first one.

    Returns:
        Why a loader cannot be compared with the others.
    """
    reasons: dict[Subject, str] = {}
    reference: tuple[Subject, torch.Tensor] | None = None
    for subject, load in loaders.items():
        try:
            images = first_images(load(False))
            first, expected = reference = reference or (subject, images)
            value = difference(images, expected, Recipe.of(run.config(case.name, *overrides).data))
        except UNAVAILABLE as error:
            reasons[subject] = str(error)
            continue
        if not run.is_done("alternatives", title, [subject], PIXELS):
            run.record(*("alternatives", title, subject, PIXELS, "of 255", [value]))
        if not value <= TOLERANCE:
            reasons[subject] = (
                f"its pixels differ from those of {first.name} by {number(value)} of 255 on "
                f"average, more than {TOLERANCE:g}"
            )
    return reasons


def refuse(reason: str) -> Draw:
    raise ValueError(reason)


def training(run: Run, load: Callable[[bool], Iterable[Any]]) -> Draw:
    return draw_from(load(True), run.device)


def other_loader(
    run: Run, case: Case, way: Way, overrides: tuple[str, ...], train: bool
) -> Iterable[Any]:
    """A way of loading for training, or for validation in this process."""
    cfg = run.config(case.name, *overrides)
    options = {**way.options, **(way.parallel(run) if train else {})}
    if way.own_format:
        split = "train" if train else "val"
        folder = f"{way.module}-{split}-{case.name}-{run.sizes.data.get(case.generator)}"
        options["folder"] = run.data_dir / folder
    files = files_of(cfg, train)
    try:
        return baseline(cfg, way.module, options, files, train)
    except Exception as error:  # what other libraries raise is theirs to choose
        raise ValueError(f"{type(error).__name__}: {error}") from error


def template_loader(
    run: Run, case: Case, name: str, overrides: tuple[str, ...], train: bool
) -> Iterable[Any]:
    """One of our loaders for training, or for validation."""
    chosen = [*loader_overrides(name, run.num_cores), *overrides]
    if name == "packed":
        chosen.append(f"loader.pack={pack(run, case, overrides)[0]}")
    loaders = build_loaders(run.config(case.name, *chosen), run.device)
    return endless(loaders[0]) if train else loaders[1]


def copying(run: Run, case: Case, as_float: bool) -> Draw:
    """The limit on noise of the size that the case's images have after resizing."""
    from benchmarks.baselines import copy_bytes

    cfg = run.config(case.name)
    count = min(MOST_COPIED, len(files_of(cfg)[0]))
    shape = (count, cfg.data.resize, cfg.data.resize * 4 // 3, 3)
    pixels = copy_bytes.write_pixels(run.data_dir / f"noise-{count}.bin", shape)
    crop = (cfg.data.crop[0], cfg.data.crop[1])
    batch_size = cfg.global_batch_size
    return draw_from(copy_bytes.batches(pixels, crop, batch_size, run.num_cores, as_float=as_float))


def first_images(loader: Iterable[Any]) -> torch.Tensor:
    """Up to MOST_COMPARED images on the CPU, those of a pair one behind the other as channels."""
    images: list[torch.Tensor] = []
    count = 0
    for batch in loader:
        parts = batch if isinstance(batch, tuple) else (batch,)
        # Copied, because some loaders write the next batch over this one.
        images.append(torch.cat([part for part in parts if part.ndim == 4], dim=1).cpu().clone())
        count += len(images[-1])
        if count >= MOST_COMPARED:
            break
    return torch.cat(images)[:MOST_COMPARED]


def difference(images: torch.Tensor, reference: torch.Tensor, recipe: Recipe) -> float:
    """Mean absolute difference of normalised images, in units of 1/255 of full intensity.

    Raises:
        ValueError: they differ in number, shape or type.
    """
    if images.shape != reference.shape or images.dtype != reference.dtype:
        raise ValueError(
            f"its output is {images.dtype} {tuple(images.shape)}, not {reference.dtype} "
            f"{tuple(reference.shape)}"
        )
    std = torch.tensor(recipe.std).view(1, -1, 1, 1)
    if len(recipe.std) > 1 and images.shape[1] != len(recipe.std):
        std = std.repeat(1, images.shape[1] // len(recipe.std), 1, 1)
    return float((255 * std * (images - reference).abs()).mean())
