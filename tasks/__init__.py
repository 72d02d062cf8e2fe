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
from conf.ranges import are_numbers
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


def class_weights(cfg: Config, loader: Loader, against_rest: bool = False) -> Tensor | None:
    """Return the weights of classes, (K,) float32 on the loader's device; None: all weigh the same.

    `auto` gives each class the same sum of weights over the training labels, with a mean of 1;
    `against_rest`, the images that have a class the same sum as those that do not have it. A class
    without any label weighs 1.
    """
    weights, info = cfg.loss.weights, loader.info
    if weights is None:
        return None
    if weights == "auto":
        labels = info.class_counts()
        if labels is None:
            raise UserError(
                "loss.weights=auto needs data that counts its classes; use null or numbers"
            )
        counts = torch.as_tensor(labels, dtype=torch.float64)
        share = counts.sum() / (counts > 0).sum()
        weights = (info.num_samples - counts if against_rest else share) / counts
        weights = weights.where(weights.isfinite() & (weights > 0), 1)
    elif not are_numbers(weights, len(info.classes), low=0):
        raise UserError(
            f"loss.weights={weights} is not for {len(info.classes)} classes; use null, auto "
            "or a list of one number of 0 or more for each class"
        )
    return torch.as_tensor(weights, dtype=torch.float32, device=loader.device)


def metrics_by_class(
    classes: tuple[str, ...], right: Tensor, predicted: Tensor, true: Tensor
) -> dict[str, dict[str, float | None]]:
    """Return precision, recall, F1 and number of samples (`support`) of each class; None where one
    is not defined. Waits for the device.

    The counts, (K,), are those of samples of which a class is predicted and true (`right`), is
    predicted, and is true.
    """
    metrics: dict[str, dict[str, float | None]] = {}
    counts = torch.stack([right, predicted, true]).T.tolist()
    for name, (hits, guesses, support) in zip(classes, counts, strict=True):
        metrics[name] = {
            "precision": hits / guesses if guesses else None,
            "recall": hits / support if support else None,
            "f1": 2 * hits / (guesses + support) if guesses + support else None,
            "support": int(support),
        }
    return metrics


def build_task(cfg: Config, loader: Loader) -> Task:
    """Build the task `cfg.task.name` for the data of the training loader; a UserError if the task
    or its loss is unknown, or it is not for such targets."""
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
