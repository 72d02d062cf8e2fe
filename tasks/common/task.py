"""Base class of tasks: the interface that the training scripts and `runtime/` use."""

from typing import Any, Literal

import numpy as np
from torch import Tensor

from conf.errors import UserError
from conf.schema import Config
from loaders import Loader
from loaders.batch import num_samples
from tasks.common.sums import divide_by_count


class Task:
    """Base class of all tasks: a loss, metrics as sums, and predictions.

    Outputs and targets are batches (`loaders.batch`): tensors, or dicts, tuples and lists of them.

    Attributes:
        target_kind: kind of targets (`loaders.targets.Target.kind`) of the task; empty: any.
        metric_names: names of the means at the start of `sums()`, `loss` first.
        best_metric: name of the metric that chooses the best epoch.
        best_mode: `max` if the highest value is best, `min` if the lowest, as for an error.
        losses: allowed values of `task.loss`; empty: any.
        refused_keys: keys of the configuration without a meaning for the task: defaults only.
        num_outputs: number of outputs of the model for each image, or for each pixel.
        num_sums: length of `sums()`.
    """

    target_kind = ""
    best_metric: str
    best_mode: Literal["max", "min"] = "max"
    metric_names: tuple[str, ...]
    losses: tuple[str, ...] = ()
    refused_keys: tuple[str, ...] = ()
    num_outputs: int
    num_sums: int

    columns: tuple[str, ...] = ()
    """Names of the values that `table_rows()` returns for an image."""

    makes_images = False
    """True if `images()` returns an image for each prediction."""

    palette: np.ndarray | None = None
    """(K, 3) uint8 colours of the indices in these images; None: they are not indices."""

    def __init__(self, cfg: Config, loader: Loader) -> None:
        """Build the task for the training loader's data; raise UserError for unsuitable settings.

        The base class uses neither argument.
        """

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the mean loss over the images of the batch, a float32 scalar."""
        return self.loss_per_image(outputs, targets).mean()

    def loss_per_image(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of each image, (N,) float32, for outputs of any float dtype.

        Raises:
            UserError: the outputs have another shape than the task needs.
        """
        raise NotImplementedError

    def sums(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sums from which `metrics()` are computed: [images, sum of losses, ...].

        (num_sums,) float64, on the device of the outputs, without waiting for it. The sums of
        batches and ranks are added up.
        """
        raise NotImplementedError

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics by name; raise ValueError if the totals are of no images."""
        return divide_by_count(self.metric_names, totals)

    def class_metrics(self, totals: Tensor) -> dict[str, dict[str, float | None]]:
        """Return metrics of each class, by the names of both, for `summary.json`; None where one is
        not defined."""
        return {}

    def predictions(self, outputs: Any) -> Tensor:
        """Return the predictions of an exported model, float32; images as (N, H, W, C)."""
        if not isinstance(outputs, Tensor):
            raise UserError(
                f"{type(self).__name__} has no predictions() of outputs that are "
                f"{type(outputs).__name__}; define it to return one tensor"
            )
        return outputs.float()

    def table_rows(self, outputs: Any) -> list[tuple[str | float, ...]]:
        """Return the values of `columns` for each image; by default, `predictions()`."""
        if not self.columns:
            return [()] * num_samples(outputs)
        return [tuple(row) for row in self.predictions(outputs).tolist()]

    def images(self, outputs: Any) -> np.ndarray | None:
        """Return an image for each prediction, to be written to a file, if the task `makes_images`.

        (N, H, W) or (N, H, W, C) uint8, or indices (N, H, W) of uint8 or uint16.
        """
        return None

    def visualize(self, inputs: Tensor, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Draw a few images with their targets and predictions for the loggers.

        Args:
            inputs: (N, 1 or 3, H, W) in [0, 1].
            outputs: outputs of the model.
            targets: targets as the loader yields them.

        Returns:
            By name, (N, 1 or 3, H, W) in [0, 1].
        """
        return {"input": inputs}

    def plots(self, totals: Tensor) -> dict[str, Tensor]:
        """Draw charts of the whole validation; by name, (1, 3, H, W) in [0, 1]."""
        return {}


def check_shape(outputs: Any, expected: tuple[int, ...], fix: str) -> None:
    """Raise UserError if the outputs are no tensor, or of a shape that broadcasting could hide."""
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"the model returned {type(outputs).__name__}, but the task needs one tensor of shape "
            f"{expected}; a model has to return it in training and in evaluation, without others "
            "such as those of auxiliary heads (aux_logits)"
        )
    if outputs.shape != expected:
        raise UserError(
            f"model outputs have shape {tuple(outputs.shape)}, but the task needs {expected}; {fix}"
        )
