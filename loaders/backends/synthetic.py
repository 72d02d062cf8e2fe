"""Batches that already lie on the device: the upper bound of what a loader can reach."""

from collections.abc import Iterator

import numpy as np
import torch

from conf.schema import Config
from loaders.backends.common import Batch, ImageLoader
from loaders.plan import PlanSampler


class SyntheticLoader(ImageLoader):
    """Noise in place of images, with the targets of some samples, the same in every batch."""

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        rows = sampler.plan(np.arange(min(self.batch_size, sampler.num_rows)))
        random, images = np.random.default_rng(cfg.seed), []
        for number, size in self.read_sizes().items():
            side = self.index.sides[number]
            shape, high = (len(rows), *size, side.channels), np.iinfo(side.dtype).max
            if side.interpolation == "nearest":
                high = len(self.info.classes)
            images.append(torch.from_numpy(random.integers(high, size=shape, dtype=side.dtype)))
        _, (self.inputs, self.targets) = self.transform(rows, tuple(images))

    def finished_batches(self) -> Iterator[Batch]:
        for rows in self.sampler:
            yield rows, (self.inputs[: len(rows)], self.targets[: len(rows)])
