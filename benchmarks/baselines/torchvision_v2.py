"""torchvision's own newest pipeline: `decode_image` and the v2 transforms in a DataLoader."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks.baselines import Recipe
from benchmarks.baselines.pil_imagefolder import data_loader


class Images(Dataset[Tensor]):
    """One tensor (3, H, W) per file: uint8, or float32 if the worker converts."""

    def __init__(self, files: Sequence[str], recipe: Recipe, uint8_batches: bool) -> None:
        self.files = list(files)
        steps = geometry(recipe)
        if not uint8_batches:
            steps += [convert(recipe)]
        self.transform = v2.Compose(steps) if steps else v2.Identity()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Tensor:
        return self.transform(decode_image(self.files[number], ImageReadMode.RGB))


def geometry(recipe: Recipe) -> list[object]:
    """The v2 transforms that resize, crop and flip."""
    steps: list[object] = []
    if recipe.resize is not None:
        size = [recipe.resize] if isinstance(recipe.resize, int) else list(recipe.resize)
        steps.append(v2.Resize(size, antialias=True))
    if recipe.crop is not None:
        crop = v2.RandomCrop if recipe.crops_randomly else v2.CenterCrop
        steps.append(crop(recipe.crop))
    if recipe.train and recipe.hflip:
        steps.append(v2.RandomHorizontalFlip(recipe.hflip))
    if recipe.train and recipe.vflip:
        steps.append(v2.RandomVerticalFlip(recipe.vflip))
    return steps


def convert(recipe: Recipe) -> object:
    """uint8 to normalised float32, of one image or of a batch."""
    return v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize(recipe.mean, recipe.std)]
    )


class _Converted:
    """uint8 batches that become float32 in the process that uses them."""

    def __init__(self, loader: Iterable[Tensor], recipe: Recipe) -> None:
        self.loader, self.convert = loader, v2.Compose([convert(recipe)])

    def __iter__(self) -> Iterator[Tensor]:
        for images in self.loader:
            yield self.convert(images)


def batches(
    files: Sequence[str],
    recipe: Recipe,
    batch_size: int,
    num_workers: int = 0,
    seed: int = 0,
    uint8_batches: bool = False,
) -> Iterable[Tensor]:
    """Images of any format that torchvision decodes, as RGB.

    Args:
        uint8_batches: workers hand over uint8, a quarter of the bytes; the conversion and the
            normalisation are then done on whole batches.
    """
    loader = data_loader(
        Images(files, recipe, uint8_batches), recipe, batch_size, num_workers, seed
    )
    return _Converted(loader, recipe) if uint8_batches else loader
