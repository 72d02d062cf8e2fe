"""The embedded digits as a Dataset with torchvision's random transforms: an example to copy."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from conf.schema import DataConfig
from loaders.targets import Labels

FILE = Path(__file__).parents[2] / "data" / "mnist_mini.npz"


class Digits(Dataset):
    def __init__(self, images: np.ndarray, labels: np.ndarray, transform: v2.Transform) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[number])[None].float() / 255
        return self.transform(image), int(self.labels[number])


def new_digits(data: DataConfig) -> Dataset:
    """Digits in a file like `FILE`, whose labels do not matter: `predict.py data.root=FILE.npz`."""
    images = np.load(data.root)["val_images"]
    return Digits(images, np.zeros(len(images)), v2.Identity())


def digits(data: DataConfig) -> tuple[Dataset, Dataset, Labels]:
    with np.load(FILE) as file:
        arrays = dict(file)
    moved = v2.RandomAffine(degrees=10, translate=(0.1, 0.1))
    labels = Labels(arrays["train_labels"].astype(np.int64), tuple("0123456789"))
    train = Digits(arrays["train_images"], arrays["train_labels"], moved)
    val = Digits(arrays["val_images"], arrays["val_labels"], v2.Identity())
    return train, val, labels
