"""Other input pipelines for the same files, as plain code to compare with.

Each is a function of a `Job` that returns an iterable of float32 batches (B, C, H, W), tuples of
two for pairs, on the CPU or the device of the job. For evaluation it yields one epoch; for training
it is endless or can be iterated over any number of times.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Recipe:
    """Preprocessing of an image, the same in all pipelines."""

    resize: int | tuple[int, int] | None = 256
    """Length of the shorter side, or (height, width), in pixels; None: no resizing."""

    crop: tuple[int, int] | None = (224, 224)
    """Height and width of the crop in pixels; None: no crop."""

    train: bool = True
    """Shuffle the files, crop randomly and flip; off: file order and center crop."""

    random_crop: bool = True
    """Crop at a random position in training; off: center crop."""

    hflip: float = 0.5
    """Probability of a horizontal flip in training."""

    vflip: float = 0.0
    """Probability of a vertical flip in training."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Per channel (or one for all), subtracted from intensities in [0, 1]."""

    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """Per channel (or one for all); divisor after the subtraction."""

    @property
    def crops_randomly(self) -> bool:
        return self.train and self.random_crop and self.crop is not None


@dataclass(frozen=True)
class Job:
    """Files to load, and how."""

    recipe: Recipe
    files: list[str]
    """Paths of the images."""

    targets: list[str]
    """Paths of the target images; empty without targets."""

    batch_size: int
    parallel: int = 0
    """Number of worker processes or threads."""

    device: torch.device = CPU
    """Device of the training; pipelines that decode on the CPU pin memory for a GPU."""

    folder: Path = Path()
    """Folder for files in a format of the library."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"
