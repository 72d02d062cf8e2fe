"""Batches that already lie on the device: the upper bound that real loaders are measured against."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from loaders.base import Loader
from loaders.plan import PlanSampler

if TYPE_CHECKING:
    from conf.schema import Config


class SyntheticLoader(Loader):
    """Noise of the data set's shape and random labels, the same in every batch: nothing is learnt."""

    def __init__(self, sampler: PlanSampler, cfg: "Config", device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        random = torch.Generator().manual_seed(cfg.seed)
        batch_size = sampler.global_batch_size // sampler.num_replicas
        shape = (batch_size, self.in_channels, *self.output_size)
        self.inputs = torch.rand(shape, generator=random).to(device)
        if cfg.loader.channels_last:
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        assert self.num_classes is not None
        self.labels = torch.randint(self.num_classes, (batch_size,), generator=random).to(device)

    def batches(self) -> Iterator[tuple[np.ndarray, Tensor]]:
        for rows in self.sampler:
            yield rows, self.inputs[: len(rows)]

    def finish(self, rows: np.ndarray, images: Tensor) -> tuple[Tensor, Tensor]:
        return images, self.labels[: len(rows)]
