"""Generated images with up to three wide or tall rectangles."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from conf.schema import DataConfig
from loaders.own_data import OwnData

SIZE = 64


class Shapes(Dataset):
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        random = np.random.default_rng(self.numbers[number])
        image = random.normal(0, 0.1, (3, SIZE, SIZE))
        sides = random.integers(8, 24, (random.integers(4), 2))
        corners = random.integers(0, 40, sides.shape)
        for (left, top), (width, height) in zip(corners, sides, strict=True):
            image[:, top : top + height, left : left + width] += random.uniform(0.4, 1, (3, 1, 1))
        boxes = torch.tensor(np.concatenate([corners, corners + sides], axis=1)).float()
        labels = torch.tensor(sides[:, 0] < sides[:, 1]).long()
        return torch.from_numpy(image).float(), {"boxes": boxes, "labels": labels}


def collate(items: list) -> tuple[Tensor, list[dict[str, Tensor]]]:
    return torch.stack([image for image, _ in items]), [target for _, target in items]


def shapes(data: DataConfig, split: str) -> OwnData | None:
    numbers = {"train": range(256), "val": range(256, 320)}.get(split)
    return OwnData(Shapes(numbers), collate_fn=collate) if numbers else None
