"""Benchmarks of loading: how fast input pipelines turn the files of a data set into batches.

Pipelines whose packages are not installed are listed with the reason. Before other pipelines are
measured, their center crops of validation images are compared with those of PIL.
"""

import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.baselines import Recipe
from benchmarks.baselines.dataloader import sleeping_items
from benchmarks.cases import Case
from benchmarks.interleave import CountItems, Workload
from benchmarks.pipelines import COMPARISONS, OURS, PROCESSES, SWEEPS, Pipeline, pack
from benchmarks.records import Subject
from benchmarks.run import UNAVAILABLE, Run, count_batches, format_number
from benchmarks.step import train
from benchmarks.template import parts
from loaders.backends import build_loaders
from loaders.index import open_splits

Workloads = dict[Subject, Workload]

# On a CPU, the experiments' own models are so slow that loading never limits them.
LIGHT_MODELS = {
    "caltech256": ("model=small_cnn", "model.kwargs.width=4"),
    "lowlight": ("model.kwargs.width=2", "model.kwargs.num_blocks=[1]"),
}
PACKING = "packing"
MAX_COMPARED = 32  # images
# Mean absolute difference from PIL's pixels, of 255. Cropping before resizing shifts images by part
# of a pixel: up to 7 in these sharp images; a wrong crop, flip or channel order gives over 30.
TOLERANCE = 10.0
SLEEP_S, SLEEPING_ITEMS, SLEEPING_BATCH_SIZE, MAX_SLEEPING_WORKERS = 0.01, 10_000, 4, 8


def compare(run: Run, benchmark: str, title: str, case: Case, workloads: Workloads) -> None:
    """Measure input pipelines on a case; the data set is generated first if missing."""
    with suppress(*UNAVAILABLE):  # reported by each subject
        run.case_overrides(case.name)
    run.compare(benchmark, title, workloads, unit=f"{case.unit}/s", epoch_size=case.published_size)


def workers(run: Run, max_sleeping: int = MAX_SLEEPING_WORKERS) -> None:
    """Measure loaders by number of workers and threads, and a mock data set of sleeping items.

    The DataLoader and DALI baselines are swept as in the published comparisons.
    """
    for name, title, plain, overrides in SWEEPS:
        for case in run.chosen(name):
            swept = [
                replace(pipeline, count=count)
                for pipeline in (plain, PROCESSES, *OURS[:2])
                for count in parallelism_sweep(run.num_cores)[0 if pipeline is plain else 1 :]
            ]
            workloads: Workloads = {
                pipeline.subject(run): partial(pipeline.load, run, case, overrides)
                for pipeline in swept
            }
            for pipeline in OURS[:2]:
                auto = ("loader.num_workers=auto", "loader.num_threads=0", *overrides)
                found = build_loaders(run.config(name, pipeline.name, *auto), run.device)[
                    0
                ].cfg.loader
                chosen = (found.num_workers, found.num_threads)
                workloads[Subject(f"{pipeline.name}, auto", *chosen)] = partial(
                    pipeline.load, run, case, auto
                )
            compare(run, "workers", title, case, workloads)
    sleepers: Workloads = {
        Subject("DataLoader", count): partial(load_sleeping_items, count)
        for count in parallelism_sweep(max_sleeping)
    }
    # Stopping a process does not stop the clock of its sleep.
    long_slices = replace(run, sizes=replace(run.sizes, slice_s=run.sizes.window_s))
    title = f"items that sleep for {1000 * SLEEP_S:g} ms"
    long_slices.compare("workers", title, sleepers, unit="items/s")


def parallelism_sweep(maximum: int) -> list[int]:
    """Numbers of workers to measure: 0 to 4, then each 1.5 times the last, up to `maximum`."""
    chosen = [0, 1, 2, 3, 4]
    while chosen[-1] < maximum:
        chosen.append(chosen[-1] * 3 // 2)
    return sorted({min(count, maximum) for count in chosen})


def load_sleeping_items(num_workers: int, count_items: CountItems) -> None:
    """Load items that sleep; workers overlap sleeping perfectly, whatever the number of cores."""
    items = sleeping_items(SLEEPING_ITEMS, SLEEP_S, SLEEPING_BATCH_SIZE, num_workers)
    count_batches(items, None, count_items)


def out_of_band(run: Run) -> None:
    """Measure packing, and loading and training from the original files and from the pack."""
    for case in run.chosen(*LIGHT_MODELS):
        measure_packing(run, case)
        light = LIGHT_MODELS[case.name] if run.device.type == "cpu" else ()
        settings = " ".join(light) or "model of the experiment"
        loading: Workloads = {
            pipeline.subject(run): partial(pipeline.load, run, case, ()) for pipeline in OURS
        }
        steps: Workloads = {
            pipeline.subject(run, settings): partial(train_from, run, case, pipeline, light)
            for pipeline in OURS
        }
        compare(run, "out_of_band", f"{case.name}, loading only", case, loading)
        compare(run, "out_of_band", f"{case.name}, training", case, steps)


def measure_packing(run: Run, case: Case) -> None:
    """Record the seconds that packing the data of a case takes with the files in the page cache."""
    subject = Subject("python -m loaders.pack")
    seconds: list[float] = []
    if run.is_done("out_of_band", case.name, [subject], PACKING):
        return
    try:
        shutil.rmtree(pack(run, case))
        start = time.perf_counter()
        folder = pack(run, case)
    except UNAVAILABLE as error:
        note = f"not measured: {error}"
    else:
        seconds.append(time.perf_counter() - start)
        size = sum(path.stat().st_size for path in folder.iterdir())
        num_samples = sum(len(index) for index in open_splits(run.config(case.name).data))
        note = f"{num_samples} {case.unit}, {size / 2**20:.0f} MiB"
    run.record(
        *("out_of_band", case.name, subject, {(PACKING, "s"): seconds}),
        epoch_size=case.published_size,
        note=note,
    )


def train_from(
    run: Run, case: Case, pipeline: Pipeline, model: tuple[str, ...], count_items: CountItems
) -> None:
    """Train on batches of one of the template's loaders."""
    cfg = run.config(case.name, *pipeline.overrides(run, case), *model)
    train(cfg, parts(cfg, run.device), run.device, count_items)


def alternatives(run: Run) -> None:
    """Compare the template's loaders with others for the same files, transforms and output."""
    for name, title, pipelines, overrides in COMPARISONS:
        for case in run.chosen(name):
            subjects = {pipeline.subject(run): pipeline for pipeline in pipelines}
            if run.is_done("alternatives", title, subjects):
                continue
            reasons = mismatched_pixels(run, case, title, subjects, overrides)
            workloads: Workloads = {
                subject: partial(refuse, reasons[subject])
                if subject in reasons
                else partial(pipeline.load, run, case, overrides)
                for subject, pipeline in subjects.items()
            }
            compare(run, "alternatives", title, case, workloads)


def refuse(reason: str, count_items: CountItems) -> None:
    raise ValueError(reason)


def mismatched_pixels(
    run: Run,
    case: Case,
    title: str,
    pipelines: dict[Subject, Pipeline],
    overrides: tuple[str, ...],
) -> dict[Subject, str]:
    """Record how much the validation images of each pipeline differ from those of the first one.

    Returns:
        Reason for each pipeline that must not be compared.
    """
    reasons: dict[Subject, str] = {}
    reference: torch.Tensor | None = None
    for subject, pipeline in pipelines.items():
        if pipeline.is_limit:
            continue
        try:
            images = first_images(pipeline.batches(run, case, overrides, train=False))
            reference = images if reference is None else reference
            recipe = Recipe.of(run.config(case.name, *overrides).data)
            value = difference(images, reference, recipe)
        except pipeline.errors as error:
            reasons[subject] = f"{type(error).__name__}: {error}"
            continue
        run.record("alternatives", title, subject, {("pixel difference", "of 255"): [value]})
        if not value <= TOLERANCE:
            reasons[subject] = (
                f"its pixels differ by {format_number(value)} of 255, over {TOLERANCE:g}"
            )
    return reasons


def first_images(loader: Iterable[Any]) -> torch.Tensor:
    """Up to MAX_COMPARED images on the CPU, (N, C, H, W); pairs are concatenated along channels."""
    images: list[torch.Tensor] = []
    for batch in loader:
        pair = batch if isinstance(batch, tuple) else (batch,)
        # Cloned because some loaders reuse the memory of a batch.
        images.append(torch.cat([part for part in pair if part.ndim == 4], dim=1).cpu().clone())
        if sum(map(len, images)) >= MAX_COMPARED:
            break
    return torch.cat(images)[:MAX_COMPARED]


def difference(images: torch.Tensor, reference: torch.Tensor, recipe: Recipe) -> float:
    """Mean absolute difference of two normalised image batches, in 1/255 of the full intensity.

    Raises:
        ValueError: they differ in shape or dtype.
    """
    if images.shape != reference.shape or images.dtype != reference.dtype:
        raise ValueError(
            f"its output is {images.dtype} {tuple(images.shape)}, not {reference.dtype} "
            f"{tuple(reference.shape)}"
        )
    std = torch.tensor(recipe.std)
    std = std.repeat(images.shape[1] // len(std)).view(1, -1, 1, 1)  # once per image of a pair
    return float((255 * std * (images - reference).abs()).mean())
