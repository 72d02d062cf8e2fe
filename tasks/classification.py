"""Classification: one class for each image."""

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Config
from loaders import Loader
from tasks.common import (
    Task,
    check_shape,
    class_weights,
    confusion_matrix,
    count_of_each,
    metrics_by_class,
    on_device,
    sum_columns,
    with_text,
)

MAX_CONFUSION_CLASSES = 1000
"""Number of classes up to which the confusion matrix is part of the sums."""


class Classification(Task):
    """Outputs: (N, number of classes) logits of any float type. Targets: (N,) int64 class indices;
    the loss also takes (N, number of classes) probabilities, from `data.mixup` or `data.cutmix`.

    Metrics: `loss`, `top1` and, with more than five classes, `top5`.
    """

    target_kind = "labels"
    best_metric = "top1"
    losses = ("cross_entropy",)

    def __init__(self, cfg: Config, loader: Loader) -> None:
        self.classes = loader.info.classes
        self.num_outputs = len(self.classes)
        self.label_smoothing = cfg.task.label_smoothing
        self.weights = class_weights(cfg, loader)
        self.metric_names = ("loss", "top1", "top5") if self.num_outputs > 5 else ("loss", "top1")
        self.num_sums = 1 + len(self.metric_names)
        self.has_confusion = self.num_outputs <= MAX_CONFUSION_CLASSES
        self.num_sums += self.has_confusion * self.num_outputs**2
        others = [(f"top{i}", f"probability{i}") for i in range(2, 6)]
        columns = ("prediction", "probability", *sum(others, ()))
        self.columns = columns[: 2 * self.num_outputs]

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_shape(
            outputs, (len(targets), self.num_outputs), "use a model for labels, such as small_cnn"
        )
        return F.cross_entropy(
            outputs.float(),
            targets,
            weight=on_device(self.weights, outputs.device),
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [images, sum of losses, right in one guess, right in five, confusion matrix]."""
        losses = self.loss_per_image(outputs, targets)
        num_guesses = 5 if "top5" in self.metric_names else 1
        guesses = outputs.topk(num_guesses, dim=1).indices
        hits = (guesses == targets.unsqueeze(1)).cumsum(dim=1)
        columns = [losses, hits[:, 0], hits[:, -1]]
        sums = sum_columns(*columns[: len(self.metric_names)])
        if self.has_confusion:
            # of the true class and, within it, of the predicted one
            cells = targets * self.num_outputs + guesses[:, 0]
            sums = torch.cat([sums, count_of_each(cells, self.num_outputs**2)])
        return sums

    def visualize(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Draw the images with their true and predicted classes."""
        pairs = zip(targets.tolist(), outputs.argmax(dim=1).tolist(), strict=True)
        texts = [f"true {self.classes[true]}\npred {self.classes[guess]}" for true, guess in pairs]
        return {"predictions": with_text(inputs, texts)}

    def plots(self, totals: Tensor) -> dict[str, Tensor]:
        if not self.has_confusion:
            return {}
        return {"confusion": confusion_matrix(self.confusion(totals), self.classes)}

    def class_metrics(self, totals: Tensor) -> dict[str, dict[str, float | None]]:
        """Return precision, recall, F1 and support of each class, of up to 1000 classes."""
        if not self.has_confusion:
            return {}
        counts = self.confusion(totals)
        sums = counts.diagonal(), counts.sum(dim=0), counts.sum(dim=1)
        return metrics_by_class(self.classes, *sums)

    def confusion(self, totals: Tensor) -> Tensor:
        """Return the number of images by true (rows) and predicted class (columns), (K, K)."""
        return totals[-(self.num_outputs**2) :].view(self.num_outputs, self.num_outputs)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return probabilities, (N, number of classes) float32."""
        return outputs.float().softmax(dim=1)

    def table_rows(self, outputs: Tensor) -> list[tuple[str | float, ...]]:
        """Return up to five classes for each image, the most likely first, with probabilities."""
        probabilities, guesses = self.predictions(outputs).topk(len(self.columns) // 2, dim=1)
        rows: list[tuple[str | float, ...]] = []
        for shares, numbers in zip(probabilities.tolist(), guesses.tolist(), strict=True):
            pairs = [(self.classes[n], f"{p:.6f}") for n, p in zip(numbers, shares, strict=True)]
            rows.append(sum(pairs, ()))
        return rows
