"""Other ways of loading the same files, as plain code to compare with.

Each module has a function `batches(files, recipe, batch_size, ...)`. Iterating over what it returns
gives one epoch of float32 batches (B, C, H, W) on the CPU; iterating again gives the next one.
"""

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conf.schema import DataConfig


@dataclass(frozen=True)
class Recipe:
    """What becomes of an image, whoever loads it."""

    resize: int | tuple[int, int] | None = 256
    """Length of the shorter side or (height, width) in pixels; None: as it is."""

    crop: tuple[int, int] | None = (224, 224)
    """Height and width of the crop in pixels; None: all."""

    train: bool = True
    """Shuffle the files, crop at a random position and flip; off: as they come, at the centre."""

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
    def of(cls, data: "DataConfig") -> "Recipe":
        """The recipe that a configuration asks for.

        Raises:
            ValueError: it asks for more than these plain ways of loading do.
        """
        if data.random_resized_crop is not None or any(data.colour_jitter):
            raise ValueError(
                "data.random_resized_crop and data.colour_jitter are not part of the comparison; "
                "use data.random_resized_crop=null data.colour_jitter=[0,0,0]"
            )
        low, high = data.value_range
        return cls(
            resize=data.resize
            if data.resize is None or isinstance(data.resize, int)
            else _pair(data.resize),
            crop=None if data.crop is None else _pair(data.crop),
            random_crop=data.random_crop,
            hflip=data.hflip,
            vflip=data.vflip,
            # (x (high - low) + low - mean) / std, as a mean and a std of x
            mean=tuple((mean - low) / (high - low) for mean in data.mean or [0.0]),
            std=tuple(std / (high - low) for std in data.std or [1.0]),
        )

    def for_evaluation(self) -> "Recipe":
        """The same without chance: files in order, crop at the centre, no flips."""
        return replace(self, train=False)

    @property
    def crops_randomly(self) -> bool:
        return self.train and self.random_crop and self.crop is not None


def _pair(values: Any) -> tuple[int, int]:
    height, width = values
    return int(height), int(width)


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
