"""What a task is: the contract that `train.py` and `runtime/` rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tasks.sums import divide_by_count

if TYPE_CHECKING:
    from conf.schema import Config
    from loaders import Loader


class Task:
    """The base class of all tasks.

    Attributes:
        takes: the kind of targets (`loaders.targets.Target.kind`) that it is for.
        metric_names: of the means at the start of its sums, `loss` first.
        best_metric: the metric that chooses the best epoch; higher is better.
        num_outputs: numbers that the model returns for each image, or for each pixel.
        num_sums: length of `sums()`.
        columns: names of what `rows()` says of an image.
        makes_images: whether `images()` makes an image of each one.
        palette: (K, 3) uint8: if images are indices, the colours to show them in.
    """

    takes: str
    best_metric: str
    metric_names: tuple[str, ...]
    num_outputs: int
    num_sums: int
    columns: tuple[str, ...] = ()
    makes_images = False
    palette: np.ndarray | None = None

    @classmethod
    def from_config(cls, cfg: Config, loader: Loader) -> Task:
        """The task for the data of the training loader; ValueError for values that do not fit."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the images of the batch, in float32; a scalar."""
        raise NotImplementedError

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[images, sum of losses, ...]: what batches and ranks add up, and all metrics follow from.

        (num_sums,) float64, on the device of the outputs; nothing waits for the device.
        """
        raise NotImplementedError

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """The metrics of added-up sums by name; ValueError without images."""
        return divide_by_count(self.metric_names, totals)

    def answers(self, outputs: Tensor) -> Tensor:
        """What an exported model returns: the outputs as their user wants them, float32, images (N, H, W, C)."""
        return outputs.float()

    def rows(self, outputs: Tensor) -> list[tuple[str | float, ...]]:
        """What a table of predictions says of each image: `columns`."""
        return [()] * len(outputs)

    def images(self, outputs: Tensor) -> np.ndarray | None:
        """What a file of predictions shows of each image, if the task `makes_images`.

        (N, H, W) or (N, H, W, C) uint8, or indices of uint8 or uint16.
        """
        return None

    def show(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Pictures of a few images, their targets and the model's outputs for TensorBoard, by name.

        Args:
            inputs: (N, 1 or 3, H, W) in [0, 1].
            outputs: of the model.
            targets: as the loader gives them.

        Returns:
            (N, 1 or 3, H, W) in [0, 1] each.
        """
        return {"input": inputs}

    def charts(self, totals: Tensor) -> dict[str, Tensor]:
        """Pictures of the whole validation, by name: (1, 3, H, W) in [0, 1] each."""
        return {}


def check_shape(outputs: Tensor, expected: tuple[int, ...], fix: str) -> None:
    """ValueError where broadcasting or an index error would hide that the model does not fit."""
    if outputs.shape != expected:
        raise ValueError(
            f"the model's outputs have shape {tuple(outputs.shape)}, but the task needs {expected}; {fix}"
        )
