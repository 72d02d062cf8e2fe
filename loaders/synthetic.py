"""Batches that already lie on the device: the upper bound that real loaders are measured against."""

from collections.abc import Iterator

import torch
from torch.nn.functional import interpolate

from conf.schema import Config
from loaders.loader import Loader
from loaders.overlap import Finished
from loaders.sampler import PlanSampler


class SyntheticLoader(Loader):
    """Noise of the data set's shape, the same in every batch: nothing is learnt."""

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        random = torch.Generator().manual_seed(cfg.seed)
        shape = (self.batch_size, self.in_channels, *self.output_size)
        self.inputs = torch.rand(shape, generator=random).to(device)
        if cfg.loader.channels_last:
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        if self.num_classes is None:
            factor = self.index.size_factors[1]
            self.targets = interpolate(self.inputs, scale_factor=float(factor))
        else:
            labels = torch.randint(self.num_classes, (self.batch_size,), generator=random)
            self.targets = labels.to(device)

    def finished_batches(self) -> Iterator[Finished]:
        for rows in self.sampler:
            yield rows, (self.inputs[: len(rows)], self.targets[: len(rows)])
