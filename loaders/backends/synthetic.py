"""Batches that already lie on the device: the upper bound of what a loader can reach."""

from collections.abc import Iterator

import torch
from torch.nn.functional import interpolate

from conf.schema import Config
from loaders.augment import Mixing, probabilities
from loaders.backends.loader import ImageLoader
from loaders.backends.transform import Batch
from loaders.plan import PlanSampler


class SyntheticLoader(ImageLoader):
    """Noise of the data set's shape, the same in every batch."""

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        random = torch.Generator().manual_seed(cfg.seed)
        shape = (self.batch_size, self.in_channels, *self.output_size)
        self.inputs = torch.rand(shape, generator=random).to(device)
        if cfg.loader.channels_last:
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        target, num_classes = self.index.target, len(self.info.classes)
        if target.interpolation == "linear":
            factor = float(self.index.sides[1].size_factor)
            self.targets = interpolate(self.inputs, scale_factor=factor)
        elif target.kind == "numbers":
            self.targets = torch.randn((self.batch_size, target.channels), generator=random)
        elif target.kind == "several labels":
            labels = torch.randint(2, (self.batch_size, num_classes), generator=random)
            self.targets = labels.float()
        else:
            size = self.output_size if target.interpolation == "nearest" else ()
            self.targets = torch.randint(num_classes, (self.batch_size, *size), generator=random)
        mixes = any(isinstance(a, Mixing) for a in sampler.augmentations)  # part: mixing
        if target.kind == "labels" and mixes:  # part: mixing
            self.targets = probabilities(self.targets, num_classes)
        self.targets = self.targets.to(device)

    def finished_batches(self) -> Iterator[Batch]:
        for rows in self.sampler:
            yield rows, (self.inputs[: len(rows)], self.targets[: len(rows)])
