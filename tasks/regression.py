"""Regression: one or more numbers for each image."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Config
from loaders import Loader
from tasks import Task, check_shape, divide_by_count, sum_columns
from tasks.pictures import with_answers


class Regression(Task):
    """Outputs and targets: (N, number of names) numbers, in the unit of the labels.

    Metrics: `loss`, `mae` (mean absolute error over images and numbers) and `r2` (coefficient of
    determination, 1 - residual / total sum of squares, the mean over numbers; where all labels are
    equal, 1 if the outputs are too and else 0, as in scikit-learn).
    """

    target_kind = "numbers"
    best_metric = "r2"
    losses = ("mse", "l1")
    metric_names = ("loss", "mae", "r2")

    def __init__(self, cfg: Config, loader: Loader) -> None:
        target: Any = loader.info.target
        self.columns = target.names
        self.num_outputs = len(target.names)
        self.num_sums = 3 + 3 * self.num_outputs
        self.number_loss = F.mse_loss if cfg.task.loss == "mse" else F.l1_loss

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_shape(outputs, tuple(targets.shape))
        return self.number_loss(outputs.float(), targets, reduction="none").mean(dim=1)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [images, sum of losses, sum of absolute errors, and of each number the sums of
        squared errors, of labels and of their squares]."""
        losses = self.loss_per_image(outputs, targets)
        labels = targets.double()
        errors = outputs.double() - labels
        sums = sum_columns(losses, errors.abs().mean(dim=1))
        return torch.cat([sums, *(c.sum(dim=0) for c in (errors**2, labels, labels**2))])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        means = divide_by_count(("loss", "mae"), totals)
        residual, label_sum, square_sum = totals[3:].cpu().view(3, self.num_outputs)
        total = square_sum - label_sum**2 / totals[0].cpu()
        varies = total > 1e-12 * square_sum  # less is rounding
        r2 = torch.where(varies, 1 - residual / total.where(varies, 1), (residual == 0).double())
        return means | {"r2": float(r2.mean())}

    def visualize(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        texts = [
            [", ".join(f"{number:.4g}" for number in numbers) for numbers in answers.tolist()]
            for answers in (targets, outputs)
        ]
        return {"predictions": with_answers(inputs, *texts)}
