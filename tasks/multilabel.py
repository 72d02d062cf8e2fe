"""Multi-label classification: any number of classes for each image."""

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Config
from loaders import Loader
from tasks.common import (
    Task,
    check_shape,
    class_weights,
    count_of_each,
    divide_by_count,
    metrics_by_class,
    on_device,
    sum_columns,
    with_text,
)

MANTISSA_BITS = 6
LOWEST_EXPONENT, HIGHEST_EXPONENT = -20, 12
BINS_PER_SIGN = (HIGHEST_EXPONENT - LOWEST_EXPONENT) << MANTISSA_BITS
NUM_BINS = 2 * BINS_PER_SIGN
LOWEST_POSITIVE = BINS_PER_SIGN - 1
"""Number of the bin that begins at a probability of 0.5, from the highest downwards."""


class MultiLabel(Task):
    """Outputs: (N, number of classes) logits of any float type. Targets: the same shape, 1 or 0; in
    the loss also between these, as `data.mixup` and `data.cutmix` mix them in training.

    Metrics: `loss` (binary cross-entropy, the mean over classes), `map` and `f1`.

    `map` is the mean average precision over the classes that any image has. Average precision needs
    the order of all scores, which does not fit into sums; so the sums are histograms of the logits
    of each class: 64 bins for each power of two from 2^-20 to 2^12, of either sign. Logits that
    differ by less than 1/64 of their size may share a bin and then count as equal, like ties in
    sklearn.metrics.average_precision_score. Logits around 0 of any scale from 1e-4 to 300 give its
    value within 0.005 where 250 images have the class, 0.02 where 50 do and 0.06 where 10 do;
    logits that hardly differ beside their mean may give more. `f1` counts all classes together
    (micro) at a probability of 0.5, the edge of a bin, and is exact.
    """

    target_kind = "several labels"
    best_metric = "map"
    losses = ("bce",)
    refused_keys = ("task.label_smoothing",)
    metric_names = ("loss", "map", "f1")

    def __init__(self, cfg: Config, loader: Loader) -> None:
        self.classes = loader.info.classes
        self.columns = self.classes
        self.num_outputs = len(self.classes)
        self.num_sums = 2 + 2 * self.num_outputs * NUM_BINS
        self.weights = class_weights(cfg, loader, against_rest=True)

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_shape(outputs, tuple(targets.shape), "use a model for labels, such as small_cnn")
        losses = F.binary_cross_entropy_with_logits(
            outputs.float(),
            targets,
            pos_weight=on_device(self.weights, outputs.device),
            reduction="none",
        )
        return losses.mean(dim=1)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [images, sum of losses, for each class the histogram of all logits, for each class
        that of the logits of images that have it]."""
        sums = sum_columns(self.loss_per_image(outputs, targets))
        first = torch.arange(self.num_outputs, device=outputs.device) * NUM_BINS
        bins, size = first + bins_of(outputs.float()), self.num_outputs * NUM_BINS
        counts = [count_of_each(bins, size, weights) for weights in (None, targets)]
        return torch.cat([sums, *counts])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the mean loss, and the mean average precision and F1, both in [0, 1]; ValueError
        without images."""
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
        """Return precision, recall and F1 at a probability of 0.5, and support, of each class."""
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
        """Draw the images with their true classes and those with a probability above 0.5."""
        pairs = zip(targets > 0, outputs > 0, strict=True)
        texts = [
            f"true {self.names_of(true)}\npred {self.names_of(guess)}" for true, guess in pairs
        ]
        return {"predictions": with_text(inputs, texts)}

    def names_of(self, has_class: Tensor) -> str:
        """Return the names of an image's classes as text, `-` if it has none."""
        pairs = zip(self.classes, has_class.tolist(), strict=True)
        return ", ".join(name for name, has_it in pairs if has_it) or "-"


def bins_of(logits: Tensor) -> Tensor:
    """Return the bins of float32 logits, 0 to NUM_BINS - 1 in their order; NaN has the lowest."""
    logits = logits.nan_to_num(nan=torch.finfo(torch.float32).min)
    # As integers, the bits of positive floats have the same order: exponent, then mantissa.
    steps = logits.abs().view(torch.int32) >> (23 - MANTISSA_BITS)
    lowest = (127 + LOWEST_EXPONENT) << MANTISSA_BITS
    steps = (steps - lowest).clamp(0, BINS_PER_SIGN - 1).long()
    return torch.where(logits >= 0, BINS_PER_SIGN + steps, BINS_PER_SIGN - 1 - steps)
