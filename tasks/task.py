"""The base class of tasks: the contract that `train.py` and `runtime/` rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from conf.errors import UserError
from tasks.sums import divide_by_count

if TYPE_CHECKING:
    from conf.schema import Config
    from loaders import Loader


class Task:
    """The base class of all tasks.

    Attributes:
        target_kind: the kind of targets (`loaders.targets.Target.kind`) that it is for; empty: any.
        metric_names: of the means at the start of its sums, `loss` first.
        best_metric: the metric that chooses the best epoch.
        best_mode: `max` if its highest value is the best, `min` if the lowest, as of an error.
        losses: names that `task.loss` can have; empty: any.
        num_outputs: numbers that the model returns for each image, or for each pixel.
        num_sums: length of `sums()`.
        columns: names of the values that `table_rows()` returns for an image.
        makes_images: whether `images()` makes an image of each one.
        palette: (K, 3) uint8: if images are indices, the colours to show them in.
    """

    target_kind = ""
    best_metric: str
    best_mode = "max"
    metric_names: tuple[str, ...]
    losses: tuple[str, ...] = ()
    num_outputs: int
    num_sums: int
    columns: tuple[str, ...] = ()
    makes_images = False
    palette: np.ndarray | None = None

    def __init__(self, cfg: Config, loader: Loader) -> None:
        """The task for the data of the training loader; UserError for values that do not fit."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the images of the batch, in float32; a scalar."""
        return self.loss_per_image(outputs, targets).mean()

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Loss of each image, (N,) float32, also from half-precision outputs.

        Raises:
            UserError: the outputs have another shape than the task needs.
        """
        raise NotImplementedError

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[images, sum of losses, ...]: what batches and ranks add up, and all metrics follow from.

        (num_sums,) float64, on the device of the outputs; nothing waits for the device.
        """
        raise NotImplementedError

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """The metrics of added-up sums by name; ValueError without images."""
        return divide_by_count(self.metric_names, totals)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Predictions of an exported model, from the outputs: float32, images as (N, H, W, C)."""
        return outputs.float()

    def table_rows(self, outputs: Tensor) -> list[tuple[str | float, ...]]:
        """One row of a table of predictions for each image: the values of `columns`, here `predictions()`."""
        if not self.columns:
            return [()] * len(outputs)
        return [tuple(row) for row in self.predictions(outputs).tolist()]

    def images(self, outputs: Tensor) -> np.ndarray | None:
        """One image to write to a file for each prediction, if the task `makes_images`.

        (N, H, W) or (N, H, W, C) uint8, or indices of uint8 or uint16.
        """
        return None

    def visualize(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Pictures of a few images, their targets and the model's outputs for TensorBoard, by name.

        Args:
            inputs: (N, 1 or 3, H, W) in [0, 1].
            outputs: of the model.
            targets: as the loader gives them.

        Returns:
            (N, 1 or 3, H, W) in [0, 1] each.
        """
        return {"input": inputs}

    def plots(self, totals: Tensor) -> dict[str, Tensor]:
        """Pictures of the whole validation, by name: (1, 3, H, W) in [0, 1] each."""
        return {}


def check_shape(outputs: Tensor, expected: tuple[int, ...], fix: str) -> None:
    """UserError where broadcasting or an index error would hide that the model does not fit."""
    if outputs.shape != expected:
        raise UserError(
            f"the model's outputs have shape {tuple(outputs.shape)}, but the task needs {expected}; {fix}"
        )
