"""The tasks by name, one file each, and what they share: losses, metrics and predictions.

Your own: `tasks/my_task.py` with a class `MyTask`, a subclass of `Task`. Metrics travel as sums,
with the number of images in front: adding the sums of batches and ranks, whatever their sizes,
gives the metrics of the whole data set.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from conf.errors import UserError, unknown_name
from conf.names import find
from conf.schema import Config
from loaders import Loader
from loaders.batch import num_samples


class Task:
    """A loss, metrics as sums, and predictions, for outputs and targets that are tensors, or dicts,
    tuples and lists of them."""

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


def sum_columns(*columns: Tensor) -> Tensor:
    """Return [N, sum of each (N,) column], (1 + number of columns,) float64."""
    # A tensor made from the number N would be copied to the device, and wait for it.
    count = torch.ones_like(columns[0])
    return torch.stack([column.double() for column in (count, *columns)]).sum(dim=1)


def count_of_each(indices: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
    """Count each index in [0, size), or add up its weights; (size,) float64.

    Unlike `torch.bincount`, this does not wait for the device.
    """
    ones = torch.ones_like(indices, dtype=torch.float64) if weights is None else weights.double()
    counts = torch.zeros(size, dtype=torch.float64, device=indices.device)
    return counts.index_add_(0, indices.flatten(), ones.flatten())


def divide_by_count(names: tuple[str, ...], totals: Tensor) -> dict[str, float]:
    """Return the means of `[count, *sums, ...]`, one for each name; waits for the device."""
    count, *sums = totals[: 1 + len(names)].tolist()
    if count == 0:
        raise ValueError("totals have 0 images; evaluate at least one, or sum over all ranks first")
    return {name: value / count for name, value in zip(names, sums, strict=True)}


def build_task(cfg: Config, loader: Loader) -> Task:
    """Build the task `cfg.task.name` for the data of the training loader.

    Raises:
        UserError: the task or its loss is unknown, or it is not for such targets.
    """
    name, target = cfg.task.name, loader.info.target
    task_class: type[Task] = find("tasks", name, "task.name")
    kind = target.kind if target else "not described"
    if task_class.target_kind not in ("", kind):
        raise UserError(
            f"task={name} is for {task_class.target_kind}, but the targets of "
            f"data={cfg.data.layout} are {kind}; use a task for {kind}, or other data "
            "(of a table: data.label_kind)"
        )
    if task_class.losses and cfg.task.loss not in task_class.losses:
        raise unknown_name("task.loss", cfg.task.loss, task_class.losses)
    return task_class(cfg, loader)
