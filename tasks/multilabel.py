"""Any number of classes per image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from tasks.pictures import with_captions
from tasks.sums import count_of_each, divide_by_count, sum_columns
from tasks.task import Task, check_shape
from tasks.weights import ClassWeights, positive_weights, refuse_label_smoothing

if TYPE_CHECKING:
    from conf.schema import Config
    from loaders import Loader

LOWEST, BINS_PER_LOGIT, NUM_BINS = -16, 64, 2048


class MultiLabel(Task):
    """Outputs: (N, len(classes)) logits of any float type. Targets: the same shape, 1 or 0; in the loss also
    between these, as `data.mixup` and `data.cutmix` mix them in training.

    Metrics: `loss` (binary cross-entropy, the mean over classes), `map` and `f1`.

    `map` is the mean average precision over the classes that any image has. Average precision needs the
    order of all scores, which does not fit into sums; so the sums are histograms of the logits of each
    class: 2048 bins, each 1/64 wide, from -16 to 16. Scores in one bin count as equal, as
    sklearn.metrics.average_precision_score treats ties: exact for scores rounded to bins, and within
    0.005 of the unrounded ones in the tests. `f1` counts all classes together (micro) at a probability
    of 0.5, the edge of a bin, and is exact.

    Args:
        classes: their names.
        loss: `bce`.
        weights: of the images that have a class against those that do not; empty: all alike.
    """

    takes = "several labels"
    best_metric = "map"
    metric_names = ("loss", "map", "f1")

    def __init__(
        self, classes: tuple[str, ...], loss: str = "bce", weights: list[float] | None = None
    ) -> None:
        if loss != "bce":
            raise ValueError(f"task.loss={loss} is not for multilabel; use bce")
        self.classes = classes
        self.num_outputs = len(classes)
        self.num_sums = 2 + 2 * len(classes) * NUM_BINS
        self.weights = ClassWeights(weights or [])
        self.columns = classes

    @classmethod
    def from_config(cls, cfg: Config, loader: Loader) -> MultiLabel:
        refuse_label_smoothing(cfg)
        return cls(loader.classes, cfg.task.loss, positive_weights(cfg, loader))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean binary cross-entropy over images and classes, in float32; a scalar."""
        return self._loss_per_image(outputs, targets).mean()

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[images, sum of losses, for each class the histogram of all logits, for each class that of the
        logits of images that have it].

        float64, on the device of the outputs; nothing waits for the device.
        """
        sums = sum_columns(self._loss_per_image(outputs, targets))
        logits = outputs.float().nan_to_num(nan=float(LOWEST))
        bins = ((logits - LOWEST) * BINS_PER_LOGIT).floor().clamp(0, NUM_BINS - 1).long()
        first = torch.arange(self.num_outputs, device=outputs.device) * NUM_BINS
        size = self.num_outputs * NUM_BINS
        counts = [count_of_each(bins + first, size, w) for w in (torch.ones_like(logits), targets)]
        return torch.cat([sums, *counts])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Mean loss, mean average precision and F1, the latter two in [0, 1]; ValueError without images."""
        loss = divide_by_count(("loss",), totals)
        # From the highest score downwards: (classes, bins).
        scored, right = totals[2:].cpu().view(2, self.num_outputs, NUM_BINS).flip(2).cumsum(dim=2)
        num_right = right[:, -1]
        gained = right.diff(dim=1, prepend=torch.zeros_like(right[:, :1]))
        precision = right / scored.clamp(min=1)
        occurs = num_right > 0
        average = (gained * precision).sum(dim=1)[occurs] / num_right[occurs]
        positive = NUM_BINS + LOWEST * BINS_PER_LOGIT - 1  # the last bin of logits above 0
        num_scored, num_hits = scored[:, positive].sum(), right[:, positive].sum()
        f1 = 2 * num_hits / (num_scored + num_right.sum()).clamp(min=1)
        return loss | {"map": float(average.mean()) if occurs.any() else 0.0, "f1": float(f1)}

    def answers(self, outputs: Tensor) -> Tensor:
        """(N, len(classes)) float32 probabilities."""
        return outputs.float().sigmoid()

    def rows(self, outputs: Tensor) -> list[tuple[str | float, ...]]:
        """Of each image, the probability of each class."""
        return [tuple(row) for row in self.answers(outputs).tolist()]

    def show(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The images with the names of their true and of their predicted classes."""

        def names(row: Tensor) -> str:
            return ", ".join(self.classes[i] for i in row.nonzero().flatten().tolist()) or "-"

        captions = []
        for true, guess in zip(targets > 0, outputs > 0, strict=True):
            colour = "lime" if torch.equal(true, guess) else "red"
            captions.append([(names(true), "white"), (names(guess), colour)])
        return {"predictions": with_captions(inputs, captions)}

    def _loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_shape(outputs, tuple(targets.shape), "use a model for labels, such as small_cnn")
        losses = F.binary_cross_entropy_with_logits(
            outputs.float(), targets, pos_weight=self.weights.on(outputs.device), reduction="none"
        )
        return losses.mean(dim=1)
