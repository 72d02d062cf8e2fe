"""The embedded digits as a Dataset with torchvision's random transforms: an example to copy."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from conf.schema import DataConfig
from loaders.own_data import OwnData
from loaders.targets import Target

FILE = Path(__file__).parents[2] / "data" / "mnist_mini.npz"


class Digits(Dataset):
    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: v2.Transform) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[number])[None].float() / 255
        return self.transform(image), int(self.labels[number])


def digits(data: DataConfig, split: str) -> OwnData | None:
    """Digits to train and to validate on; `new` ones, whose labels do not matter, are in a file
    like `FILE`: `predict.py data.root=FILE.npz`."""
    if split == "test":
        return None
    with np.load(data.root if split == "new" else FILE) as file:
        arrays = dict(file)
    name = "train" if split == "train" else "val"
    moved = v2.RandomAffine(degrees=10, translate=(0.1, 0.1))
    labels = arrays[f"{name}_labels"].astype(np.int64)
    dataset = Digits(arrays[f"{name}_images"], labels, moved if split == "train" else v2.Identity())
    return OwnData(dataset, Target("labels", labels, tuple("0123456789")))
