"""One class per image."""

from torch import Tensor
from torch.nn import functional as F

from tasks.sums import divide_by_count, sum_columns


class Classification:
    """Outputs: (N, num_classes) logits of any float type. Targets: (N,) int64 class indices.

    Attributes:
        metric_names: `loss`, `top1` and, with more than five classes, `top5`.
        best_metric: the one that chooses the best epoch; higher is better.
        columns: names of what a table of predictions says of an image.
    """

    best_metric = "top1"

    def __init__(
        self,
        num_classes: int,
        loss: str = "cross_entropy",
        label_smoothing: float = 0.0,
        classes: tuple[str, ...] = (),
    ) -> None:
        if loss != "cross_entropy":
            raise ValueError(f"task.loss={loss} is not for classification; use cross_entropy")
        if not 0 <= label_smoothing < 1:
            raise ValueError(
                f"task.label_smoothing={label_smoothing} is not in [0, 1); use 0.1, for example"
            )
        self.label_smoothing = label_smoothing
        self.metric_names = ("loss", "top1", "top5") if num_classes > 5 else ("loss", "top1")
        self.classes = classes or tuple(map(str, range(num_classes)))
        self.num_guesses = min(5, num_classes)
        guesses = [(f"top{i}", f"probability{i}") for i in range(1, self.num_guesses + 1)]
        self.columns: tuple[str, ...] = ("prediction", "probability", *sum(guesses, ()))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the batch, in float32; a scalar."""
        return self._loss_per_image(outputs, targets).mean()

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[images, sum of losses, images right at the first guess, ... within five guesses].

        float64, on the device of the outputs; nothing waits for the device.
        """
        num_guesses = 5 if "top5" in self.metric_names else 1
        guesses = outputs.topk(num_guesses, dim=1).indices
        hits = (guesses == targets.unsqueeze(1)).cumsum(dim=1)
        columns = [self._loss_per_image(outputs, targets), hits[:, 0], hits[:, -1]]
        return sum_columns(*columns[: len(self.metric_names)])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Mean loss and the fractions top1 and, if it is there, top5 in [0, 1]; ValueError without images."""
        return divide_by_count(self.metric_names, totals)

    def answers(self, outputs: Tensor) -> Tensor:
        """(N, num_classes) float32 probabilities: what an exported model returns."""
        return outputs.float().softmax(dim=1)

    def rows(self, outputs: Tensor) -> list[tuple[str, ...]]:
        """For each image `columns`: the class, its probability, and the five likeliest with theirs."""
        probabilities, guesses = self.answers(outputs).topk(self.num_guesses, dim=1)
        rows = []
        for shares, numbers in zip(probabilities.tolist(), guesses.tolist(), strict=True):
            said = [(self.classes[n], f"{p:.6f}") for n, p in zip(numbers, shares, strict=True)]
            rows.append((*said[0], *sum(said, ())))
        return rows

    def images(self, outputs: Tensor) -> Tensor | None:
        """None: classes are no images."""
        return None

    def _loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            outputs.float(),
            targets,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
