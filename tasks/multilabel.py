"""Multi-label classification: any number of classes for each image."""

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Config
from loaders import Loader
from tasks import (
    Task,
    check_shape,
    class_weights,
    count_of_each,
    divide_by_count,
    metrics_by_class,
    sum_columns,
)
from tasks.pictures import with_answers

LARGEST_LOGIT = 20
BINS_PER_UNIT = 100
NUM_BINS = 2 * LARGEST_LOGIT * BINS_PER_UNIT
LOWEST_POSITIVE = NUM_BINS // 2 - 1
"""Number of the bin that begins at a probability of 0.5, from the highest downwards."""


class MultiLabel(Task):
    """Outputs: (N, number of classes) logits of any float type. Targets: the same shape, 1 or 0; in
    the loss also between these, as `data.mixup` and `data.cutmix` mix them in training.

    Metrics: `loss` (binary cross-entropy, the mean over classes), `map` and `f1`.

    `map` is the mean average precision over the classes that any image has. Average precision needs
    the order of all scores, which does not fit into sums; so the sums are histograms of the logits
    of each class, in bins of 0.01 from -20 to 20: scores within a bin count as equal. `f1` counts
    all classes together (micro) at a probability of 0.5, the edge of a bin, and is exact.
    """

    target_kind = "several labels"
    best_metric = "map"
    losses = ("bce",)
    metric_names = ("loss", "map", "f1")

    def __init__(self, cfg: Config, loader: Loader) -> None:
        self.classes = loader.info.classes
        self.columns = self.classes
        self.num_outputs = len(self.classes)
        self.num_sums = 2 + 2 * self.num_outputs * NUM_BINS
        self.weights = class_weights(cfg, loader, against_rest=True)

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_shape(outputs, tuple(targets.shape))
        losses = F.binary_cross_entropy_with_logits(
            outputs.float(), targets, pos_weight=self.weights, reduction="none"
        )
        return losses.mean(dim=1)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [images, sum of losses, for each class the histogram of all logits, for each class
        that of the logits of images that have it]."""
        sums = sum_columns(self.loss_per_image(outputs, targets))
        first = torch.arange(self.num_outputs, device=outputs.device) * NUM_BINS
        bins, size = first + bins_of(outputs), self.num_outputs * NUM_BINS
        counts = [count_of_each(bins, size, weights) for weights in (None, targets)]
        return torch.cat([sums, *counts])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        loss = divide_by_count(("loss",), totals)
        scored, right = self.from_highest(totals)
        num_right = right[:, -1]
        gained = right.diff(dim=1, prepend=torch.zeros_like(right[:, :1]))
        precision = right / scored.clamp(min=1)
        occurs = num_right > 0
        average = (gained * precision).sum(dim=1)[occurs] / num_right[occurs]
        num_scored, num_hits = scored[:, LOWEST_POSITIVE].sum(), right[:, LOWEST_POSITIVE].sum()
        f1 = 2 * num_hits / (num_scored + num_right.sum()).clamp(min=1)
        return loss | {"map": float(average.mean()) if occurs.any() else 0.0, "f1": float(f1)}

    def class_metrics(self, totals: Tensor) -> dict[str, dict[str, float | None]]:
        scored, right = self.from_highest(totals)
        sums = right[:, LOWEST_POSITIVE], scored[:, LOWEST_POSITIVE], right[:, -1]
        return metrics_by_class(self.classes, *sums)

    def from_highest(self, totals: Tensor) -> Tensor:
        """Return the numbers of all images and of those that have the class, of each class, from
        the highest score down to each bin, (2, classes, bins), on the CPU."""
        return totals[2:].cpu().view(2, self.num_outputs, NUM_BINS).flip(2).cumsum(dim=2)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return probabilities, (N, number of classes) float32."""
        return outputs.float().sigmoid()

    def visualize(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        names = [map(self.names_of, answers > 0) for answers in (targets, outputs)]
        return {"predictions": with_answers(inputs, *names)}

    def names_of(self, has_class: Tensor) -> str:
        """Return the names of an image's classes as text, `-` if it has none."""
        pairs = zip(self.classes, has_class.tolist(), strict=True)
        return ", ".join(name for name, has_it in pairs if has_it) or "-"


def bins_of(logits: Tensor) -> Tensor:
    """Return the bins of logits, 0 to NUM_BINS - 1 in their order; NaN has the lowest."""
    within = logits.double().nan_to_num(nan=-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    return ((within + LARGEST_LOGIT) * BINS_PER_UNIT).long().clamp(max=NUM_BINS - 1)
