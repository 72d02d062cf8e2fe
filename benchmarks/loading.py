"""How fast files become batches: three benchmarks, all of them of ways of loading on a case's data.

Whatever is not installed is listed with the reason. Before others' ways of loading are timed, their
centre crops of validation images are compared with those of PIL.
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
from benchmarks.records import Subject
from benchmarks.run import UNAVAILABLE, Run, fetch, number
from benchmarks.step import train
from benchmarks.template import parts
from benchmarks.turns import Count, Program
from benchmarks.ways import COMPARISONS, OURS, PROCESSES, SWEEPS, Way, pack
from loaders.image_loaders import build_loaders
from loaders.open import open_splits

Programs = dict[Subject, Program]

# On a CPU the experiments' own models take so long that no loader ever makes them wait.
LIGHT_MODELS = {
    "caltech256": ("model=small_cnn", "model.kwargs.width=4"),
    "lowlight": ("model.kwargs.width=2", "model.kwargs.num_blocks=[1]"),
}
PACKING = "packing"
MOST_COMPARED = 32  # images
# Mean absolute difference from PIL's pixels, of 255. Who cuts before resizing is off by a fraction of
# a pixel, which makes up to 7 in these sharp-edged images; another crop, a flip or swapped channels
# make more than 30.
TOLERANCE = 10.0
SLEEP_S, SLEEPING_ITEMS, SLEEPING_BATCH_SIZE, MOST_SLEEPING_WORKERS = 0.01, 10_000, 4, 8


def compare(run: Run, benchmark: str, title: str, case: Case, programs: Programs) -> None:
    """Measure ways of loading a case's data side by side."""
    with suppress(*UNAVAILABLE):  # which each subject reports
        run.case_overrides(case.name)  # generates the data once for all subjects
    run.compare(benchmark, title, programs, unit=f"{case.unit}/s", epoch_size=case.published_size)


def workers(run: Run, most_sleeping: int = MOST_SLEEPING_WORKERS) -> None:
    """The write-up's DataLoader and ours by workers, ours and DALI by threads, as the write-ups do it;
    then the mock data set whose items sleep."""
    for name, title, plain, overrides in SWEEPS:
        for case in run.chosen(name):
            swept = [
                replace(way, count=count)
                for way in (plain, PROCESSES, *OURS[:2])
                for count in counts(run.num_cores)[0 if way is plain else 1 :]
            ]
            programs: Programs = {
                way.subject(run): partial(way.load, run, case, overrides) for way in swept
            }
            for way in OURS[:2]:
                auto = ("loader.num_workers=auto", "loader.num_threads=0", *overrides)
                found = build_loaders(run.config(name, way.name, *auto), run.device)[0].cfg.loader
                chosen = (found.num_workers, found.num_threads)
                programs[Subject(f"{way.name}, auto", *chosen)] = partial(way.load, run, case, auto)
            compare(run, "workers", title, case, programs)
    sleepers: Programs = {
        Subject("DataLoader", count): partial(sleeping, count) for count in counts(most_sleeping)
    }
    # A sleep goes on while its process is stopped.
    whole_turns = replace(run, sizes=replace(run.sizes, turn_s=run.sizes.window_s))
    title = f"items that sleep for {1000 * SLEEP_S:g} ms"
    whole_turns.compare("workers", title, sleepers, unit="items/s")


def counts(most: int) -> list[int]:
    """0, 1, 2, 3, 4, then in steps of about a half, up to `most`."""
    chosen = [0, 1, 2, 3, 4]
    while chosen[-1] < most:
        chosen.append(chosen[-1] * 3 // 2)
    return sorted({min(count, most) for count in chosen})


def sleeping(num_workers: int, count: Count) -> None:
    """Workers overlap sleep perfectly, whatever the number of CPUs."""
    items = sleeping_items(SLEEPING_ITEMS, SLEEP_S, SLEEPING_BATCH_SIZE, num_workers)
    fetch(items, None, count)


def out_of_band(run: Run) -> None:
    """What packing takes; then loading alone, and training, from the originals and from the pack."""
    for case in run.chosen(*LIGHT_MODELS):
        measure_packing(run, case)
        light = LIGHT_MODELS[case.name] if run.device.type == "cpu" else ()
        settings = " ".join(light) or "model of the experiment"
        loading: Programs = {way.subject(run): partial(way.load, run, case, ()) for way in OURS}
        steps: Programs = {
            way.subject(run, settings): partial(training, run, case, way, light) for way in OURS
        }
        compare(run, "out_of_band", f"{case.name}, loading only", case, loading)
        compare(run, "out_of_band", f"{case.name}, training", case, steps)


def measure_packing(run: Run, case: Case) -> None:
    """The time that packing the case's data takes, which the system has in memory."""
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


def training(run: Run, case: Case, way: Way, model: tuple[str, ...], count: Count) -> None:
    """Training steps with the batches of one of our loaders."""
    cfg = run.config(case.name, *way.overrides(run, case), *model)
    train(cfg, parts(cfg, run.device), run.device, count)


def alternatives(run: Run) -> None:
    """Ours beside all others that can be had: same files, same steps, same output."""
    for name, title, ways, overrides in COMPARISONS:
        for case in run.chosen(name):
            subjects = {way.subject(run): way for way in ways}
            if run.is_done("alternatives", title, subjects):
                continue
            reasons = wrong_pixels(run, case, title, subjects, overrides)
            programs: Programs = {
                subject: partial(refuse, reasons[subject])
                if subject in reasons
                else partial(way.load, run, case, overrides)
                for subject, way in subjects.items()
            }
            compare(run, "alternatives", title, case, programs)


def refuse(reason: str, count: Count) -> None:
    raise ValueError(reason)


def wrong_pixels(
    run: Run, case: Case, title: str, ways: dict[Subject, Way], overrides: tuple[str, ...]
) -> dict[Subject, str]:
    """Write down how much each way's images for validation differ from those of the first one.

    Returns:
        Why a way cannot be compared with the others.
    """
    reasons: dict[Subject, str] = {}
    reference: torch.Tensor | None = None
    for subject, way in ways.items():
        if way.is_limit:
            continue
        try:
            images = first_images(way.batches(run, case, overrides, train=False))
            reference = images if reference is None else reference
            recipe = Recipe.of(run.config(case.name, *overrides).data)
            value = difference(images, reference, recipe)
        except way.errors as error:
            reasons[subject] = f"{type(error).__name__}: {error}"
            continue
        run.record("alternatives", title, subject, {("pixel difference", "of 255"): [value]})
        if not value <= TOLERANCE:
            reasons[subject] = f"its pixels differ by {number(value)} of 255, over {TOLERANCE:g}"
    return reasons


def first_images(loader: Iterable[Any]) -> torch.Tensor:
    """Up to MOST_COMPARED images on the CPU, those of a pair one behind the other as channels."""
    images: list[torch.Tensor] = []
    for batch in loader:
        pair = batch if isinstance(batch, tuple) else (batch,)
        # Copied, because some loaders write the next batch over this one.
        images.append(torch.cat([part for part in pair if part.ndim == 4], dim=1).cpu().clone())
        if sum(map(len, images)) >= MOST_COMPARED:
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
    std = torch.tensor(recipe.std)
    std = std.repeat(images.shape[1] // len(std)).view(1, -1, 1, 1)  # pairs have it twice
    return float((255 * std * (images - reference).abs()).mean())
