"""Batches that already lie on the device: the upper bound that real loaders are measured against."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from loaders.base import Loader, RawBatch
from loaders.plan import PlanSampler

if TYPE_CHECKING:
    from conf.schema import Config


class SyntheticLoader(Loader):
    """Noise of the data set's shape, the same in every batch: nothing is learnt."""

    def __init__(self, sampler: PlanSampler, cfg: "Config", device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        self.finishes_ahead = False
        random = torch.Generator().manual_seed(cfg.seed)
        shape = (self.batch_size, self.in_channels, *self.output_size)
        self.inputs = torch.rand(shape, generator=random).to(device)
        if cfg.loader.channels_last:
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        if self.num_classes is None:
            scale = self.index.scales[1]
            self.targets = interpolate(self.inputs, scale_factor=float(scale))
        else:
            labels = torch.randint(self.num_classes, (self.batch_size,), generator=random)
            self.targets = labels.to(device)

    def batches(self) -> Iterator[RawBatch]:
        for rows in self.sampler:
            yield rows, ()

    def finish(self, rows: np.ndarray, images: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return self.inputs[: len(rows)], self.targets[: len(rows)]
