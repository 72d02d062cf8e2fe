"""The I/O tuning guide's mock data set, whose items only sleep: it shows how workers overlap."""

import time
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class SleepingImages(Dataset[Tensor]):
    """Items of shape (1, 1, 1) that each take `sleep_s` seconds and no CPU time."""

    def __init__(self, size: int, sleep_s: float) -> None:
        self.size, self.sleep_s = size, sleep_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Tensor:
        time.sleep(self.sleep_s)
        return torch.zeros(1, 1, 1)


def batches(size: int, sleep_s: float, batch_size: int, num_workers: int) -> Iterable[Tensor]:
    """float32 batches (B, 1, 1, 1) of a data set whose every item sleeps."""
    # More workers than cores is the point here.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    return DataLoader(
        SleepingImages(size, sleep_s),
        batch_size,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
