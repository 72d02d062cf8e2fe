"""FFCV in its JPEG mode: its own file of JPEGs, decoded, cut and resized by compiled threads."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from benchmarks.baselines import Job, optional
from benchmarks.baselines.dataloader import Items

# FFCV encodes anew; this is about as dense as photographs on the web.
JPEG_QUALITY = 75


def load(path: str) -> tuple[np.ndarray]:
    with Image.open(path) as image:
        return (np.asarray(image.convert("RGB")),)


def prepare(files: list[str], path: Path, num_workers: int) -> Path:
    """The file, which is written if it is not there."""
    fields = optional("ffcv.fields", "ffcv")
    writer = optional("ffcv.writer", "ffcv")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        image = fields.RGBImageField(write_mode="jpg", jpeg_quality=JPEG_QUALITY)
        writer.DatasetWriter(
            str(unfinished), {"image": image}, num_workers=num_workers
        ).from_indexed_dataset(Items(files, load))
        unfinished.rename(path)
    return path


def random_square(
    size_ratio: float, height: int, width: int, scale: float, ratio: float
) -> tuple[int, int, int, int]:
    """Top, left, height and width of the square that is the crop once the image is resized."""
    side = int(size_ratio * min(height, width))
    top, left = np.random.randint(height - side + 1), np.random.randint(width - side + 1)
    return top, left, side, side


def random_square_decoder(crop: tuple[int, int], size_ratio: float) -> Any:
    """FFCV's decoder with the rectangle of `random_square`."""
    rgb_image = optional("ffcv.fields.rgb_image", "ffcv")

    class RandomSquare(rgb_image.ResizedCropRGBImageDecoder):  # type: ignore[name-defined]
        scale = 0.0
        ratio = 0.0

        @property
        def get_crop_generator(self) -> Callable[..., tuple[int, int, int, int]]:
            return partial(random_square, size_ratio)

    return RandomSquare(crop)


def batches(job: Job) -> Iterator[Tensor]:
    """Square crops of images whose shorter side is resized.

    Raises:
        ValueError: the recipe asks for anything else.
    """
    size, crop = job.recipe.resize, job.recipe.crop
    if not isinstance(size, int) or crop is None or crop[0] != crop[1]:
        raise ValueError(
            "FFCV resizes and crops squares only; use data.resize=256 data.crop=[224,224]"
        )
    loaders = optional("ffcv.loader", "ffcv")
    decoders = optional("ffcv.fields.decoders", "ffcv")
    transforms = optional("ffcv.transforms", "ffcv")
    if job.recipe.crops_randomly:
        steps = [random_square_decoder(crop, crop[0] / size)]
    else:
        steps = [decoders.CenterCropRGBImageDecoder(crop, crop[0] / size)]
    if job.recipe.train and job.recipe.hflip:
        steps.append(transforms.RandomHorizontalFlip(job.recipe.hflip))
    mean, std = 255 * np.array(job.recipe.mean), 255 * np.array(job.recipe.std)
    steps += [transforms.NormalizeImage(mean, std, np.float32), transforms.ToTensor()]
    if job.on_gpu:
        steps.append(transforms.ToDevice(job.device, non_blocking=True))
    steps.append(transforms.ToTorchImage(channels_last=True))
    order = loaders.OrderOption.RANDOM if job.recipe.train else loaders.OrderOption.SEQUENTIAL
    loader = loaders.Loader(
        str(prepare(job.files, job.folder / "images.beton", job.parallel)),
        batch_size=job.batch_size,
        num_workers=job.parallel,
        order=order,
        seed=0,
        drop_last=job.recipe.train,
        pipelines={"image": steps},
    )
    while True:
        # FFCV writes later batches over earlier ones and hands out channels_last.
        for (images,) in loader:
            yield images.contiguous()
        if not job.recipe.train:
            return
