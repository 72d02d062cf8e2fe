"""Pipelines with PyTorch's DataLoader: PIL, torchvision's v2 transforms, and tifffile."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import tifffile
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchcodec.decoders import decode_image
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.baselines import Job, Recipe

Pair = tuple[Tensor, Tensor]


def data_loader(job: Job, sources: list[Any], load: Callable[[Any], Any]) -> DataLoader[Any]:
    """DataLoader of `load(source)` for each source; tuples of two batches for pairs.

    Workers persist between epochs, which matters for small data sets. For a GPU, memory is pinned.
    """
    return DataLoader(
        cast(Any, sources),
        job.batch_size,
        shuffle=job.recipe.train,
        drop_last=job.recipe.train,
        collate_fn=partial(load_batch, load),
        num_workers=job.parallel,
        persistent_workers=job.parallel > 0,
        pin_memory=job.on_gpu,
        generator=torch.Generator().manual_seed(0),
    )


def load_batch(load: Callable[[Any], Any], sources: list[Any]) -> Any:
    items = [load(source) for source in sources]
    if isinstance(items[0], Tensor):
        return torch.stack(items)
    return tuple(torch.stack(parts) for parts in zip(*items, strict=True))


def geometry(recipe: Recipe, package: Any) -> list[Any]:
    """Transforms that resize, crop and flip, from torchvision's `transforms` or `transforms.v2`."""
    steps: list[Any] = []
    if recipe.resize is not None:
        steps.append(package.Resize(recipe.resize, antialias=True))
    if recipe.crop is not None:
        crop = package.RandomCrop if recipe.crops_randomly else package.CenterCrop
        steps.append(crop(recipe.crop))
    if recipe.train and recipe.hflip:
        steps.append(package.RandomHorizontalFlip(recipe.hflip))
    if recipe.train and recipe.vflip:
        steps.append(package.RandomVerticalFlip(recipe.vflip))
    return steps


def to_tensor(recipe: Recipe) -> list[Any]:
    """Transforms from a PIL image to a normalised float32 tensor."""
    return [transforms.ToTensor(), transforms.Normalize(recipe.mean, recipe.std)]


def load_pil(path: str, transform: Callable[[Any], Tensor]) -> Tensor:
    with Image.open(path) as image:
        return transform(image.convert("RGB"))


def pil_images(job: Job) -> Iterable[Tensor]:
    """Images with PIL, as in the I/O tuning guide and most tutorials."""
    steps = [*geometry(job.recipe, transforms), *to_tensor(job.recipe)]
    return data_loader(job, job.files, partial(load_pil, transform=transforms.Compose(steps)))


def convert(recipe: Recipe) -> Any:
    """Transform from uint8 to normalised float32, for an image or a batch."""
    return v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize(recipe.mean, recipe.std)]
    )


def load_torchvision(path: str, transform: Callable[[Tensor], Tensor]) -> Tensor:
    return transform(decode_image(path))


def torchvision_images(job: Job) -> Iterable[Tensor]:
    """Images with torchcodec's decoder and torchvision's v2 transforms."""
    steps = [*geometry(job.recipe, v2), convert(job.recipe)]
    return data_loader(job, job.files, partial(load_torchvision, transform=v2.Compose(steps)))


def load_tiff(path: str, transform: Callable[[Tensor], Tensor]) -> Tensor:
    pixels = torch.from_numpy(tifffile.imread(path))
    image = pixels.permute(2, 0, 1).to(torch.float32)
    return transform(image / torch.iinfo(pixels.dtype).max)


def tifffile_images(job: Job) -> Iterable[Tensor]:
    """Interleaved TIFFs with any number of channels, resized and cropped as float32 tensors."""
    normalise = transforms.Normalize(job.recipe.mean, job.recipe.std)
    transform = transforms.Compose([*geometry(job.recipe, transforms), normalise])
    return data_loader(job, job.files, partial(load_tiff, transform=transform))


def load_pair(paths: tuple[str, str], transform: Callable[[Any], Pair]) -> Pair:
    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(image.convert("RGB"))
    return transform(tuple(images))


def pil_pairs(job: Job) -> Iterable[Pair]:
    """Pairs with PIL as in the speed-up template, with the same crop and flips for both images."""
    steps = [*geometry(job.recipe, v2), v2.ToImage(), convert(job.recipe), v2.ToPureTensor()]
    load = partial(load_pair, transform=v2.Compose(steps))
    return data_loader(job, list(zip(job.files, job.targets, strict=True)), load)


def image_folder(root: Path, recipe: Recipe, batch_size: int, workers: int) -> Iterable[Any]:
    """Images and labels with torchvision's data set and transforms, as in its examples."""
    steps = [v2.PILToTensor(), *geometry(recipe, v2), convert(recipe)]
    return DataLoader(
        ImageFolder(str(root), v2.Compose(steps)),
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )
