"""Base class of tasks: the interface that the training scripts and `runtime/` use."""

from typing import Any, Literal

from torch import Tensor

from conf.errors import UserError
from conf.schema import Config
from loaders import Loader
from loaders.batch import num_samples
from tasks.common.sums import divide_by_count


class Task:
    """A loss, metrics as sums, and predictions, for outputs and targets that are tensors, or dicts,
    tuples and lists of them.
    """

    target_kind = ""
    """`kind` of the targets (`loaders/targets.py`) that it takes; empty: any."""

    losses: tuple[str, ...] = ()
    """Allowed values of `task.loss`; empty: any."""

    num_outputs: int
    """Outputs of the model for each image, or for each pixel."""

    num_sums: int
    """Length of `sums()`."""

    metric_names: tuple[str, ...]
    """Names of the means at the start of `sums()`, `loss` first."""

    best_metric: str
    """The metric that chooses the best epoch."""

    best_mode: Literal["max", "min"] = "max"
    """`max` if its highest value is best, `min` if the lowest, as for an error."""

    columns: tuple[str, ...] = ()
    """Names of the values that `table_rows()` returns for an image; `image` is a picture."""

    def __init__(self, cfg: Config, loader: Loader) -> None:
        """Build the task for the training loader's data; raise UserError if it is unsuitable."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the mean loss over the images of the batch, a float32 scalar."""
        return self.loss_per_image(outputs, targets).mean()

    def loss_per_image(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of each image, (N,) float32, for outputs of any float dtype; see
        `check_shape()`."""
        raise NotImplementedError

    def sums(self, outputs: Any, targets: Any) -> Tensor:
        """Return the sums from which `metrics()` are computed: [images, sum of losses, ...],
        (num_sums,) float64, on the device of the outputs, without waiting for it."""
        raise NotImplementedError

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics by name; raise ValueError if the totals are of no images."""
        return divide_by_count(self.metric_names, totals)

    def class_metrics(self, totals: Tensor) -> dict[str, dict[str, float | None]]:
        """Return metrics of each class for `summary.json`; None where one is not defined."""
        return {}

    def predictions(self, outputs: Any) -> Tensor:
        """Return the predictions of an exported model, float32; images as (N, H, W, C)."""
        if not isinstance(outputs, Tensor):
            raise UserError(
                f"{type(self).__name__} has no predictions() of outputs that are "
                f"{type(outputs).__name__}; define it to return one tensor"
            )
        return outputs.float()

    def table_rows(self, outputs: Any) -> list[tuple[Any, ...]]:
        """Return the values of `columns` for each image: text, numbers, or Pillow's images,
        which become PNG files. By default, `predictions()`."""
        if not self.columns:
            return [()] * num_samples(outputs)
        return [tuple(row) for row in self.predictions(outputs).tolist()]

    def visualize(self, inputs: Tensor, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Draw a few images with their targets and predictions for the loggers; inputs and
        drawings, by name, are (N, 1 or 3, H, W) in [0, 1]."""
        return {"input": inputs}

    def plots(self, totals: Tensor) -> dict[str, Tensor]:
        """Draw charts of the whole validation; by name, (1, 3, H, W) in [0, 1]."""
        return {}


def check_shape(outputs: Any, expected: tuple[int, ...]) -> None:
    """Raise UserError if the outputs are no tensor, or of a shape that broadcasting could hide."""
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"the model returned {type(outputs).__name__}, but the task needs one tensor of shape "
            f"{expected}, in training and in evaluation; turn auxiliary heads off (aux_logits)"
        )
    if outputs.shape != expected:
        raise UserError(
            f"model outputs have shape {tuple(outputs.shape)}, but the task needs {expected}; use "
            "unet for masks, nafnet for images, or another model for labels"
        )
