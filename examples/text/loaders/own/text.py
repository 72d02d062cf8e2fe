"""The bytes of any file, in pieces."""

import random
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from conf.schema import DataConfig
from loaders.own_data import OwnData

LENGTH = 32


class Text(Dataset):
    """Inputs: bytes of a text. Targets: the byte that follows each of them."""

    def __init__(self, text: bytes, is_shifted: bool) -> None:
        self.text, self.is_shifted = torch.tensor(list(text)), is_shifted

    def __len__(self) -> int:
        return len(self.text) // LENGTH - 2

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        first = number * LENGTH + self.is_shifted * random.randrange(LENGTH)
        part = self.text[first : first + LENGTH + 1]
        return part[:-1], part[1:]


def text(data: DataConfig, split: str) -> OwnData | None:
    content = Path(data.root).read_bytes()
    cut = int(len(content) * (1 - data.val_fraction))
    if split == "train":
        return OwnData(Text(content[:cut], is_shifted=True))
    return OwnData(Text(content[cut:], is_shifted=False)) if split == "val" else None
