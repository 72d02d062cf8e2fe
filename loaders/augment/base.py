"""The base class of augmentations, on which the plan and the transform rely."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config, DataConfig
from loaders.targets import Target

Random = Callable[[str, int], np.ndarray]
"""(rows, n) float64 in [0, 1) from a column's name and n. Each name has its own random numbers, so
switching on one augmentation leaves the columns of the others unchanged."""


class Augmentation:
    """The base class: adds nothing, draws nothing, does nothing.

    Attributes:
        keys: keys of `data` that switch it on; their values are part of a checkpoint.
        columns: name and dtype of the columns that it adds to a row.
        moves: it changes where in the image something is.
    """

    keys: tuple[str, ...] = ()
    columns: tuple[tuple[str, str], ...] = ()
    moves = False

    def check(self, cfg: Config, target: Target, world_size: int) -> None:
        """Raise UserError if it does not support such targets or batches."""

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        """Draw the values of its columns, which are zeros before, into the rows, whose images have
        these (len(rows), 2) heights and widths in pixels."""

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        """Change inputs or target images, (B, C, H, W) float32 in [0, 1], as their rows say;
        they may be changed in place. Masks are never passed."""
        return images

    def apply_to_both(
        self, inputs: Tensor, targets: Tensor, rows: np.ndarray, target: Target
    ) -> tuple[Tensor, Tensor]:
        """Change inputs, (B, C, H, W) float32, and targets, of the kind `target`, as the model sees
        them, after all of `apply`; both may be changed in place."""
        return inputs, targets


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy values to a device; to a GPU from pinned memory, which does not block the host."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
