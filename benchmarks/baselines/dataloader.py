"""The files through torch's DataLoader: with PIL, torchvision's v2 transforms and tifffile."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import tifffile
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks.baselines import Job, Recipe

Pair = tuple[Tensor, Tensor]


def data_loader(job: Job, sources: list[Any], load: Callable[[Any], Any]) -> DataLoader[Any]:
    """What `load` makes of sources, in batches; for pairs in a tuple of two.

    Workers live on between epochs, so that small data is not at a disadvantage, and memory is pinned
    where batches go to a GPU.
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
    """What resizes, crops and flips, of torchvision's `transforms` or its `v2`."""
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
    """From a PIL image to a normalised float32 tensor."""
    return [transforms.ToTensor(), transforms.Normalize(recipe.mean, recipe.std)]


def load_pil(path: str, transform: Callable[[Any], Tensor]) -> Tensor:
    with Image.open(path) as image:
        return transform(image.convert("RGB"))


def load_pil_draft(path: str, shorter_side: int, transform: Callable[[Any], Tensor]) -> Tensor:
    with Image.open(path) as image:
        image.draft("RGB", (shorter_side, shorter_side))
        return transform(image.convert("RGB"))


def pil_images(job: Job) -> Iterable[Tensor]:
    """As the I/O tuning guide and most tutorials load class folders of JPEGs."""
    steps = [*geometry(job.recipe, transforms), *to_tensor(job.recipe)]
    return data_loader(job, job.files, partial(load_pil, transform=transforms.Compose(steps)))


def pil_draft_images(job: Job) -> Iterable[Tensor]:
    """The same, of JPEGs that are decoded as small as `data.resize` allows."""
    steps = [*geometry(job.recipe, transforms), *to_tensor(job.recipe)]
    size, transform = job.recipe.resize, transforms.Compose(steps)
    load = partial(load_pil_draft, shorter_side=cast(int, size), transform=transform)
    return data_loader(job, job.files, load)


def convert(recipe: Recipe) -> Any:
    """uint8 to normalised float32, of one image or of a batch."""
    return v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize(recipe.mean, recipe.std)]
    )


def load_torchvision(path: str, transform: Callable[[Tensor], Tensor]) -> Tensor:
    return transform(decode_image(path, ImageReadMode.RGB))


def torchvision_images(job: Job) -> Iterable[Tensor]:
    """torchvision's own newest pipeline."""
    steps = [*geometry(job.recipe, v2), convert(job.recipe)]
    return data_loader(job, job.files, partial(load_torchvision, transform=v2.Compose(steps)))


def torchvision_uint8(job: Job) -> Iterator[Tensor]:
    """Workers hand over a quarter of the bytes; whole batches are converted and normalised, on the GPU
    if there is one."""
    transform = v2.Compose([v2.Identity(), *geometry(job.recipe, v2)])
    loader = data_loader(job, job.files, partial(load_torchvision, transform=transform))
    to_float = convert(job.recipe)
    while True:
        for images in loader:
            yield to_float(images.to(job.device, non_blocking=True))
        if not job.recipe.train:
            return


def load_tiff(path: str, transform: Callable[[Tensor], Tensor]) -> Tensor:
    pixels = torch.from_numpy(tifffile.imread(path))
    image = pixels.permute(2, 0, 1).to(torch.float32)
    return transform(image / torch.iinfo(pixels.dtype).max)


def tifffile_images(job: Job) -> Iterable[Tensor]:
    """Interleaved TIFFs of any number of channels, as the multi-channel benchmark loads them: resized
    and cropped after the conversion."""
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
    """Pairs as the speed-up template and the DALI tutorial load them: cut at one place, flipped alike."""
    steps = [*geometry(job.recipe, v2), v2.ToImage(), convert(job.recipe), v2.ToPureTensor()]
    load = partial(load_pair, transform=v2.Compose(steps))
    return data_loader(job, list(zip(job.files, job.targets, strict=True)), load)


def sleep_for(seconds: float) -> Tensor:
    time.sleep(seconds)
    return torch.zeros(1, 1, 1)


def sleeping_items(num_items: int, sleep_s: float, batch_size: int, num_workers: int) -> Any:
    """The I/O tuning guide's mock data set, each of whose items sleeps and takes no CPU time."""
    # More workers than cores is the point here.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    job = Job(Recipe(train=False), [], [], batch_size, num_workers)
    return data_loader(job, [sleep_s] * num_items, sleep_for)
