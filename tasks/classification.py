"""Classification: one class for each image."""

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Config
from loaders import Loader
from tasks import Task, check_shape, class_weights, count_of_each, metrics_by_class, sum_columns
from tasks.pictures import confusion_matrix, with_answers

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
        self.num_cells = self.num_outputs**2 if self.num_outputs <= MAX_CONFUSION_CLASSES else 0
        self.num_sums = 1 + len(self.metric_names) + self.num_cells
        self.columns = ("prediction", "probability")
        for place in range(2, 1 + min(5, self.num_outputs)):
            self.columns += (f"top{place}", f"probability{place}")

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_shape(outputs, (len(targets), self.num_outputs))
        outputs, smoothing = outputs.float(), self.label_smoothing
        return F.cross_entropy(
            outputs, targets, self.weights, reduction="none", label_smoothing=smoothing
        )

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return [images, sum of losses, right in one guess, right in five, confusion matrix]."""
        losses = self.loss_per_image(outputs, targets)
        guesses = outputs.topk(min(5, self.num_outputs), dim=1).indices
        hits = (guesses == targets.unsqueeze(1)).cumsum(dim=1)
        columns = [losses, hits[:, 0], hits[:, -1]]
        sums = sum_columns(*columns[: len(self.metric_names)])
        if not self.num_cells:
            return sums
        # of the true class and, within it, of the predicted one
        cells = targets * self.num_outputs + guesses[:, 0]
        return torch.cat([sums, count_of_each(cells, self.num_cells)])

    def visualize(self, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        names = [[self.classes[n] for n in x.tolist()] for x in (targets, outputs.argmax(dim=1))]
        return {"predictions": with_answers(inputs, *names)}

    def plots(self, totals: Tensor) -> dict[str, Tensor]:
        if not self.num_cells:
            return {}
        return {"confusion": confusion_matrix(self.confusion(totals), self.classes)}

    def class_metrics(self, totals: Tensor) -> dict[str, dict[str, float | None]]:
        if not self.num_cells:
            return {}
        counts = self.confusion(totals)
        return metrics_by_class(
            self.classes, counts.diagonal(), counts.sum(dim=0), counts.sum(dim=1)
        )

    def confusion(self, totals: Tensor) -> Tensor:
        """Return the number of images by true (rows) and predicted class (columns), (K, K)."""
        return totals[-self.num_cells :].view(self.num_outputs, self.num_outputs)

    def predictions(self, outputs: Tensor) -> Tensor:
        """Return probabilities, (N, number of classes) float32."""
        return outputs.float().softmax(dim=1)

    def table_rows(self, outputs: Tensor) -> list[tuple[str | float, ...]]:
        """Return up to five classes for each image, the most likely first, with probabilities."""
        probabilities, guesses = self.predictions(outputs).topk(len(self.columns) // 2, dim=1)
        rows = []
        for shares, numbers in zip(probabilities.tolist(), guesses.tolist(), strict=True):
            pairs = zip([self.classes[number] for number in numbers], shares, strict=True)
            rows.append(tuple(cell for pair in pairs for cell in pair))
        return rows
