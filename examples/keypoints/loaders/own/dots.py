"""Generated photos of various sizes with a red, a green and a blue dot, which move with the crops.

`frame` is three points of the photo, which the transforms move as they move the dots. It is an
input that the model passes on, and no target, because new photos have no targets.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import Image, KeyPoints

from conf.schema import DataConfig
from loaders.own_data import OwnData

CROP = 48


class Dots(Dataset):
    """Inputs: crops, and where (0, 0), (1, 0), (0, 1) of the photo lie in them. Targets: dots."""

    def __init__(self, numbers: range, crop: v2.Transform) -> None:
        self.numbers, self.crop = numbers, crop

    def __len__(self) -> int:
        return len(self.numbers)

    def photo(self, number: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng(self.numbers[number])
        width, height = random.integers(60, 90, 2)
        dots = random.uniform(0.2, 0.8, (3, 2)) * (width, height)
        y, x = np.mgrid[:height, :width]
        image = np.stack([np.hypot(x - left, y - top) < 7 for left, top in dots])
        noisy = image + random.normal(0, 0.2, image.shape)
        return torch.from_numpy(noisy).float(), torch.from_numpy(dots).float()

    def __getitem__(self, number: int) -> tuple[dict[str, Tensor], Tensor]:
        image, dots = self.photo(number)
        points = torch.cat([torch.tensor([[0.0, 0], [1, 0], [0, 1]]), dots])
        keypoints = KeyPoints(points, canvas_size=image.shape[-2:])
        image, points = self.crop(Image(image), keypoints)
        return {"image": image, "frame": points[:3]}, points[3:]


def dots(data: DataConfig, split: str) -> OwnData | None:
    crop = v2.RandomResizedCrop(CROP, scale=(0.5, 1))
    if split == "train":
        return OwnData(Dots(range(256), v2.Compose([crop, v2.RandomHorizontalFlip()])))
    whole = v2.Resize((CROP, CROP))
    return OwnData(Dots(range(256, 320), whole)) if split == "val" else None
