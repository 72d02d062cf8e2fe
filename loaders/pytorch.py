"""PyTorch's own DataLoader as the backend."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from loaders.base import Loader
from loaders.index import Index
from loaders.plan import PlanSampler

if TYPE_CHECKING:
    from conf.schema import Config

Batch = tuple[np.ndarray, Tensor]


class PlannedImages(Dataset[Batch]):
    """Executes rows of the plan: item `rows` is the batch of their images.

    The DataLoader hands a whole batch of rows to `__getitems__`, so nothing is collated.
    """

    def __init__(self, index: Index, size: tuple[int, int]) -> None:
        assert index.images is not None
        self.images = torch.from_numpy(index.images)
        self.size = size

    def __getitems__(self, rows: np.ndarray) -> Batch:
        images = self.images[torch.from_numpy(rows["sample"].copy())]
        height, width = images.shape[1:3]
        whole = (rows["height"] == height) & (rows["width"] == width)
        if not whole.all() or self.size != (height, width):
            images = torch.stack(
                [cut(image, row, self.size) for image, row in zip(images, rows, strict=True)]
            )
        for name, dim in [("vflip", 1), ("hflip", 2)]:
            if rows[name].any():
                flipped = torch.from_numpy(rows[name].copy())
                images[flipped] = images[flipped].flip(dim)
        return rows, images


def cut(image: Tensor, row: np.void, size: tuple[int, int]) -> Tensor:
    """The row's rectangle of a (H, W, C) uint8 image, resized to `size` with antialiasing."""
    image = image[row["y"] : row["y"] + row["height"], row["x"] : row["x"] + row["width"]]
    if image.shape[:2] == size:
        return image
    channels_first = image.permute(2, 0, 1)[None]
    resized = interpolate(channels_first, size, mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0)


def _as_it_is(batch: Any) -> Any:
    return batch


class PyTorchLoader(Loader):
    """Batches through `torch.utils.data.DataLoader`, whose batch sampler walks the plan."""

    def __init__(self, sampler: PlanSampler, cfg: "Config", device: torch.device) -> None:
        super().__init__(sampler, cfg, device)
        workers = cfg.loader.num_workers
        self.data_loader = DataLoader(
            PlannedImages(sampler.index, self.output_size),
            batch_sampler=sampler,
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=cfg.loader.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )

    def batches(self) -> Iterator[Batch]:
        yield from self.data_loader
