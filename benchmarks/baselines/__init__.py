"""Other ways of loading the same files, as plain code to compare with.

Each is a function of a `Job`. What it returns gives float32 batches (B, C, H, W), for pairs tuples of
two, on the CPU or on the device: one epoch in evaluation; in training either epoch after epoch, or an epoch
each time that it is iterated over.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conf.schema import DataConfig
from loaders.augment import AUGMENTATIONS

CPU = torch.device("cpu")
AUGMENTS_BY = ("random_crop", "hflip", "vflip")


@dataclass(frozen=True)
class Recipe:
    """What becomes of an image, whoever loads it."""

    resize: int | tuple[int, int] | None = 256
    """Length of the shorter side or (height, width) in pixels; None: as it is."""

    crop: tuple[int, int] | None = (224, 224)
    """Height and width of the crop in pixels; None: all."""

    train: bool = True
    """Shuffle the files, crop at a random position and flip; off: no chance, crop at the centre."""

    random_crop: bool = True
    """In training; off: at the centre there too."""

    hflip: float = 0.5
    """Probability of a left-right flip in training."""

    vflip: float = 0.0
    """Probability of an upside-down flip in training."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Per channel (or one for all), subtracted from intensities in [0, 1]."""

    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """Per channel (or one for all), divides after that."""

    @classmethod
    def of(cls, data: DataConfig, train: bool = True) -> "Recipe":
        """The recipe that a configuration asks for.

        Raises:
            ValueError: it asks for more than these plain ways of loading do.
        """
        active = [key for a in AUGMENTATIONS for key in a.active_keys(data)]
        if more := [f"data.{key}" for key in active if key not in AUGMENTS_BY]:
            raise ValueError(f"{', '.join(more)}: not part of the comparison; leave it out")
        low, high = data.value_range
        size: Any = data.resize
        crop: Any = data.crop
        return cls(
            resize=size if size is None or isinstance(size, int) else tuple(size),
            crop=crop and tuple(crop),
            train=train,
            random_crop=data.random_crop,
            hflip=data.hflip,
            vflip=data.vflip,
            # (x (high - low) + low - mean) / std, as a mean and a std of x
            mean=tuple((mean - low) / (high - low) for mean in data.mean or [0.0]),
            std=tuple(std / (high - low) for std in data.std or [1.0]),
        )

    @property
    def crops_randomly(self) -> bool:
        return self.train and self.random_crop and self.crop is not None


@dataclass(frozen=True)
class Job:
    """What is to be loaded, and with which means."""

    recipe: Recipe
    files: list[str]
    """Paths of the images."""

    targets: list[str]
    """Paths of the images' targets; empty: there are none."""

    batch_size: int
    parallel: int = 0
    """Worker processes or threads, whichever the way of loading has."""

    device: torch.device = CPU
    """Where the batches are needed; who decodes on a GPU uses this one, all others pin memory for it."""

    folder: Path = Path()
    """Where files of a format of one's own are, or are written to."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def optional(module: str, package: str) -> Any:
    """A module of a package that need not be installed.

    Raises:
        ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{package} is not installed ({error}); pip install {package}"
        ) from error
