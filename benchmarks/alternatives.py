"""Our loaders beside all others that can be had: same files, same steps, same output, in one run.

Whatever is not installed is listed with the reason. Before a way of loading is timed, its centre
crops of validation images are compared with those of PIL.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.baselines import Recipe
from benchmarks.cases import WHOLE_IMAGES, Case
from benchmarks.records import Subject
from benchmarks.run import Builder, Draw, Run, number
from benchmarks.ways import CELLS, OURS, PAIRS, PHOTOS, Way, limit

MOST_COMPARED = 32  # images
# Mean absolute difference from PIL's pixels, of 255. Who cuts before resizing is off by a fraction of
# a pixel, which makes up to 7 in these sharp-edged images; another crop, a flip or swapped channels
# make more than 30.
TOLERANCE = 10.0
PIXELS = "pixel difference"
COMPARISONS: list[tuple[str, str, list[Way], tuple[str, ...]]] = [
    ("caltech256", "JPEGs, resize 256, random crop 224", PHOTOS, ()),
    ("pairs", "pairs of JPEGs, resize 256, random crop 224", PAIRS, ()),
    ("cells", "5-channel TIFFs, reading only", CELLS, WHOLE_IMAGES),
    ("cells", "5-channel TIFFs, resize and crop", CELLS, ()),
]


def main(run: Run) -> None:
    """Compare the pixels of all ways and of our loaders, then measure them side by side."""
    for name, title, others, overrides in COMPARISONS:
        for case in run.chosen(name):
            ways = {way.subject(run): way for way in (*others, *OURS)}
            builders: dict[Subject, Builder] = {
                subject: partial(way.draw, run, case, overrides) for subject, way in ways.items()
            }
            if name != "cells":
                builders |= limit(run, "limit: decoding alone", case, "decode")
                builders |= limit(run, "limit: decoding and resizing", case, "resize")
            if name == "caltech256":
                builders |= limit(run, "limit: copying bytes", case, "copy")
                builders |= limit(run, "limit: copying bytes, to float32", case, "copy to float32")
            if run.is_done("alternatives", title, builders):
                continue
            for subject, reason in wrong_pixels(run, case, title, ways, overrides).items():
                builders[subject] = partial(refuse, reason)
            run.compare(
                *("alternatives", title, builders),
                unit=f"{case.unit}/s",
                epoch_size=case.published_size,
            )


def wrong_pixels(
    run: Run, case: Case, title: str, ways: Mapping[Subject, Way], overrides: tuple[str, ...]
) -> dict[Subject, str]:
    """Write down how much each way's images for validation differ from those of the first one.

    Returns:
        Why a way cannot be compared with the others.
    """
    reasons: dict[Subject, str] = {}
    reference: torch.Tensor | None = None
    for subject, way in ways.items():
        try:
            images = first_images(way.batches(run, case, overrides, train=False))
            reference = images if reference is None else reference
            recipe = Recipe.of(run.config(case.name, *overrides).data)
            value = difference(images, reference, recipe)
        except way.errors as error:
            reasons[subject] = f"{type(error).__name__}: {error}"
            continue
        run.record("alternatives", title, subject, {(PIXELS, "of 255"): [value]})
        if not value <= TOLERANCE:
            reasons[subject] = f"its pixels differ by {number(value)} of 255, over {TOLERANCE:g}"
    return reasons


def refuse(reason: str) -> Draw:
    raise ValueError(reason)


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
