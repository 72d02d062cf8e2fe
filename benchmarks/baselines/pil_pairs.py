"""Pairs of images as the speed-up template and the DALI tutorial load them: PIL + DataLoader."""

import random
from collections.abc import Iterable, Sequence

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.transforms import functional as F

from benchmarks.baselines import Recipe
from benchmarks.baselines.pil_imagefolder import data_loader, to_normalised_tensor

Pair = tuple[Tensor, Tensor]


class Pairs(Dataset[Pair]):
    """Two float32 tensors (C, H, W) per item, cut out at the same place and flipped alike."""

    def __init__(self, inputs: Sequence[str], targets: Sequence[str], recipe: Recipe) -> None:
        self.files = list(zip(inputs, targets, strict=True))
        self.recipe = recipe
        self.to_tensor = transforms.Compose(to_normalised_tensor(recipe))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Pair:
        recipe = self.recipe
        images = []
        for path in self.files[number]:
            with Image.open(path) as file:
                image = file.convert("RGB")
            images.append(F.resize(image, recipe.resize) if recipe.resize is not None else image)
        if recipe.crops_randomly:
            place = transforms.RandomCrop.get_params(images[0], recipe.crop)
            images = [F.crop(image, *place) for image in images]
        elif recipe.crop is not None:
            images = [F.center_crop(image, recipe.crop) for image in images]
        if recipe.train and random.random() < recipe.hflip:
            images = [F.hflip(image) for image in images]
        if recipe.train and random.random() < recipe.vflip:
            images = [F.vflip(image) for image in images]
        return self.to_tensor(images[0]), self.to_tensor(images[1])


def batches(
    inputs: Sequence[str],
    targets: Sequence[str],
    recipe: Recipe,
    batch_size: int,
    num_workers: int = 0,
    seed: int = 0,
) -> Iterable[Pair]:
    """(inputs, targets), each float32 (B, C, H, W)."""
    return data_loader(
        Pairs(inputs, targets, recipe), recipe, batch_size, num_workers, seed, stack_pairs
    )


def stack_pairs(pairs: list[Pair]) -> Pair:
    inputs, targets = zip(*pairs, strict=True)
    return torch.stack(inputs), torch.stack(targets)
