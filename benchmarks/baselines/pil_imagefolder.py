"""Class folders of JPEGs as the I/O tuning guide and most tutorials load them: PIL + DataLoader."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.baselines import Recipe

T = TypeVar("T")


class Images(Dataset[Tensor]):
    """One float32 tensor (C, H, W) per file."""

    def __init__(self, files: Sequence[str], recipe: Recipe) -> None:
        self.files = list(files)
        self.transform = transforms.Compose([*geometry(recipe), *to_normalised_tensor(recipe)])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Tensor:
        with Image.open(self.files[number]) as image:
            return self.transform(image.convert("RGB"))


def geometry(recipe: Recipe) -> list[object]:
    """torchvision's transforms that resize, crop and flip."""
    steps: list[object] = []
    if recipe.resize is not None:
        steps.append(transforms.Resize(recipe.resize))
    if recipe.crop is not None:
        crop = transforms.RandomCrop if recipe.crops_randomly else transforms.CenterCrop
        steps.append(crop(recipe.crop))
    if recipe.train and recipe.hflip:
        steps.append(transforms.RandomHorizontalFlip(recipe.hflip))
    if recipe.train and recipe.vflip:
        steps.append(transforms.RandomVerticalFlip(recipe.vflip))
    return steps


def to_normalised_tensor(recipe: Recipe) -> list[object]:
    return [transforms.ToTensor(), transforms.Normalize(recipe.mean, recipe.std)]


def batches(
    files: Sequence[str], recipe: Recipe, batch_size: int, num_workers: int = 0, seed: int = 0
) -> Iterable[Tensor]:
    """Decode, convert to RGB, resize, crop, flip, to tensor, normalise, in worker processes."""
    return data_loader(Images(files, recipe), recipe, batch_size, num_workers, seed)


def data_loader(
    dataset: Dataset[T],
    recipe: Recipe,
    batch_size: int,
    num_workers: int,
    seed: int,
    collate: Callable[[list[T]], Any] | None = None,
) -> DataLoader[T]:
    """torch's DataLoader. Its workers live on between epochs, so that small data is not at a
    disadvantage."""
    return DataLoader(
        dataset,
        batch_size,
        shuffle=recipe.train,
        drop_last=recipe.train,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        generator=torch.Generator().manual_seed(seed),
    )
