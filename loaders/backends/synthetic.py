"""Batches that already lie on the device: the upper bound of what a loader can reach."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from conf.schema import Config
from loaders.batch import Batch, part
from loaders.loader import Loader
from loaders.plan import Plan
from loaders.transform import ImageTransform


def synthetic_loader(plan: Plan, transform: ImageTransform, cfg: Config) -> Loader:
    """Build the loader of noise in place of images, with the targets of some samples, the same in
    every batch."""
    info, rectangles = transform.info(plan), transform.rectangles
    rows = plan.rows(0, np.arange(min(plan.batch_size, plan.num_rows)))
    random, images = np.random.default_rng(cfg.seed), []
    for side, size in zip(rectangles.index.sides, rectangles.read_sizes(), strict=True):
        is_mask = side.interpolation == "nearest"
        high = len(info.classes) if is_mask else np.iinfo(side.dtype).max
        noise = random.integers(high, size=(len(rows), *size, side.channels), dtype=side.dtype)
        images.append(torch.from_numpy(noise))
    plan.fetches = False
    batches = Repeated(plan, transform(Batch(rows, tuple(images))))
    return Loader(plan, batches, lambda batch: batch.content, info, transform.device)


@dataclass
class Repeated(Iterable[Batch]):
    """One batch, with the rows of each batch of a plan."""

    plan: Plan
    batch: tuple[Any, Any]

    def __iter__(self) -> Iterator[Batch]:
        for rows in self.plan:
            yield Batch(rows, part(self.batch, 0, len(rows)))
