"""FFCV in its JPEG mode: its own file of JPEGs, decoded, cut and resized by compiled threads."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.baselines import Recipe, optional

# FFCV encodes anew; this is about as dense as photographs on the web.
JPEG_QUALITY = 75


class _Images(Dataset[Any]):
    def __init__(self, files: Sequence[str]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[np.ndarray]:
        with Image.open(self.files[number]) as image:
            return (np.asarray(image.convert("RGB")),)


def prepare(files: Sequence[str], path: Path, num_workers: int) -> Path:
    """The file, which is written if it is not there."""
    fields = optional("ffcv.fields", "ffcv")
    writer = optional("ffcv.writer", "ffcv")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        image = fields.RGBImageField(write_mode="jpg", jpeg_quality=JPEG_QUALITY)
        writer.DatasetWriter(
            str(unfinished), {"image": image}, num_workers=num_workers
        ).from_indexed_dataset(_Images(files))
        unfinished.rename(path)
    return path


def _random_square_decoder(recipe: Recipe) -> Any:
    """Cuts out the square that is the crop once the image is resized, at a random place."""
    rgb_image = optional("ffcv.fields.rgb_image", "ffcv")

    class RandomSquare(rgb_image.ResizedCropRGBImageDecoder):  # type: ignore[name-defined]
        scale = 0.0

        def __init__(self, size: tuple[int, int], ratio: float) -> None:
            super().__init__(size)
            self.ratio = ratio

        @property
        def get_crop_generator(self) -> Callable[..., tuple[int, int, int, int]]:
            def random_square(
                height: int, width: int, scale: float, ratio: float
            ) -> tuple[int, int, int, int]:
                side = int(ratio * min(height, width))
                top = np.random.randint(0, height - side + 1)
                left = np.random.randint(0, width - side + 1)
                return top, left, side, side

            return random_square

    assert recipe.crop is not None
    assert isinstance(recipe.resize, int)
    return RandomSquare(recipe.crop, recipe.crop[0] / recipe.resize)


class Batches:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Tensor]:
        # FFCV writes later batches over earlier ones and hands out channels_last.
        for (images,) in self.loader:
            yield images.contiguous()


def batches(
    files: Sequence[str],
    recipe: Recipe,
    batch_size: int,
    num_threads: int = 2,
    seed: int = 0,
    folder: Path = Path("data/bench/ffcv"),
) -> Batches:
    """Square crops of images whose shorter side is resized.

    Args:
        folder: where FFCV's file is, or is written to.

    Raises:
        ValueError: the recipe asks for anything else.
    """
    if (
        not isinstance(recipe.resize, int)
        or recipe.crop is None
        or recipe.crop[0] != recipe.crop[1]
    ):
        raise ValueError(
            "FFCV resizes and crops squares only; use data.resize=256 data.crop=[224,224]"
        )
    loaders = optional("ffcv.loader", "ffcv")
    decoders = optional("ffcv.fields.decoders", "ffcv")
    transforms = optional("ffcv.transforms", "ffcv")
    path = prepare(files, folder / "images.beton", num_threads)
    steps: list[Any]
    if recipe.crops_randomly:
        steps = [_random_square_decoder(recipe)]
    else:
        steps = [decoders.CenterCropRGBImageDecoder(recipe.crop, recipe.crop[0] / recipe.resize)]
    if recipe.train and recipe.hflip:
        steps.append(transforms.RandomHorizontalFlip(recipe.hflip))
    mean, std = 255 * np.array(recipe.mean), 255 * np.array(recipe.std)
    steps += [
        transforms.NormalizeImage(mean, std, np.float32),
        transforms.ToTensor(),
        transforms.ToTorchImage(channels_last=True),
    ]
    order = loaders.OrderOption.RANDOM if recipe.train else loaders.OrderOption.SEQUENTIAL
    loader = loaders.Loader(
        str(path),
        batch_size=batch_size,
        num_workers=num_threads,
        order=order,
        seed=seed,
        drop_last=recipe.train,
        pipelines={"image": steps},
    )
    return Batches(loader)
