"""The base class of all backends."""

from functools import partial

import torch

from conf.schema import Config
from loaders.backends.common.transform import BatchTransform
from loaders.common import DataInfo
from loaders.epoch import Loader
from loaders.index import class_counts
from loaders.plan import PlanSampler


class ImageLoader(Loader):
    """Iterates over this rank's batches of one split.

    A batch is `(inputs, targets)` on `device`: float32 inputs of shape (B, C, H, W), and targets as
    `info.target` says, see `loaders.targets.Target`; with `data.mixup` or `data.cutmix`, labels of
    training batches are (B, classes) float32 probabilities. A backend implements
    `finished_batches()`, by `transform.finish()` of its images.

    Attributes:
        index: index of the split.
        device: device of the batches.
        read_size: (height, width) of the images that the backend delivers, usually the inputs'.
            If all rows enlarge rectangles of one size, it is their size, and the device enlarges
            the whole batch, so that fewer bytes are copied to it. Masks have the inputs' size.
    """

    sampler: PlanSampler

    def __init__(self, sampler: PlanSampler, cfg: Config, device: torch.device) -> None:
        self.cfg, self.device, self.index = cfg, device, sampler.index
        self.read_size = self.output_size = sampler.output_size
        shapes = sampler.distinct_shapes
        if (
            shapes is not None
            and (shapes == shapes[0]).all()
            and (shapes <= self.output_size).all()
        ):
            self.read_size = int(shapes[0, 0]), int(shapes[0, 1])
        self.transform = BatchTransform(sampler, cfg, device, self.read_size != self.output_size)
        index = self.index
        info = DataInfo(
            target=index.target,
            in_channels=index.channels,
            dtype=index.dtype,
            num_samples=len(index),
            num_dropped=len(index) - sampler.num_rows,
            example=torch.zeros(1, index.channels, *self.output_size),
            name_of=index.name_of,
            pictures=self.transform.denormalize,
            # Not a lambda, which would keep this loader alive.
            class_counts=partial(class_counts, index),
        )
        super().__init__(sampler, info)

    def read_sizes(self) -> dict[int, tuple[int, int]]:
        """Return (height, width) of the images that the backend delivers, by side."""
        return {
            number: self.output_size
            if side.interpolation == "nearest"
            else (side.size_factor * self.read_size[0], side.size_factor * self.read_size[1])
            for number, side in enumerate(self.index.sides)
        }
