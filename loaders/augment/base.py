"""The base class of augmentations, on which the plan and the transform rely."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from conf.schema import DataConfig
from loaders.targets import Target

Random = Callable[[str, int], np.ndarray]
"""(rows, n) float64 in [0, 1) from a column's name and n. Each name has its own random numbers, so
switching on one augmentation leaves the columns of the others unchanged."""


class Augmentation:
    """The base class: adds nothing, draws nothing, does nothing.

    Attributes:
        keys: keys of `data` that switch it on; their values are part of a checkpoint.
        columns: columns that it adds to a row: name, dtype and neutral value.
    """

    keys: tuple[str, ...] = ()
    columns: tuple[tuple[str, str, float], ...] = ()

    def draw(self, rows: np.ndarray, sizes: np.ndarray, data: DataConfig, random: Random) -> None:
        """Draw the values of its columns into the rows; called only if one of its keys is on.

        Args:
            rows: rows of dtype `plan.ROW` with neutral values.
            sizes: (len(rows), 2) height and width of the rows' images in pixels.
            data: the configuration.
            random: random numbers, of which those of a row depend on that row alone.
        """

    def apply(self, images: Tensor, rows: np.ndarray) -> Tensor:
        """Change inputs or target images, (B, C, H, W) float32 in [0, 1], as their rows say.

        The images may be changed in place. Masks are never passed.
        """
        return images

    def apply_to_both(
        self, inputs: Tensor, targets: Tensor, rows: np.ndarray, target: Target
    ) -> tuple[Tensor, Tensor]:
        """Change inputs and targets as the model sees them, after all of `apply`.

        Both may be changed in place.

        Args:
            inputs: (B, C, H, W) float32 on the device, normalised.
            targets: targets of the kind `target`, on the device.
            rows: rows of the B samples of this rank.
            target: kind of the targets.
        """
        return inputs, targets

    @property
    def changes_images(self) -> bool:
        """True if it acts by `apply`."""
        return type(self).apply is not Augmentation.apply

    def is_neutral(self, rows: np.ndarray) -> bool:
        """Return True if these rows leave the images unchanged."""
        return all(bool((rows[name] == neutral).all()) for name, _, neutral in self.columns)

    def active_keys(self, data: DataConfig) -> list[str]:
        """Return those of its keys whose values differ from the defaults of `DataConfig`."""
        off = DataConfig()
        return [key for key in self.keys if getattr(data, key) != getattr(off, key)]

    def check(
        self, data: DataConfig, target: Target, global_batch_size: int, world_size: int
    ) -> None:
        """Raise UserError if it does not support such targets or batches."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device; to a GPU from pinned memory, which does not block the host."""
    if device.type == "cuda" and not values.is_pinned():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def on_device(device: torch.device, *columns: np.ndarray) -> list[Tensor]:
    """Copy arrays of shape (rows, any) to the device as float32 tensors, in one copy that does not
    block the host."""
    widths = [column.shape[1] for column in columns]
    together = torch.from_numpy(np.concatenate(columns, axis=1).astype(np.float32))
    return list(to_device(together, device).split(widths, dim=1))
