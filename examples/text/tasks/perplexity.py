"""The next byte of a text."""

import math

from torch import Tensor
from torch.nn import functional as F

from tasks import Task, sum_columns


class Perplexity(Task):
    """Outputs: (N, length, 256) logits. Targets: (N, length) bytes."""

    best_metric, best_mode = "perplexity", "min"
    metric_names = ("loss",)
    num_outputs, num_sums = 256, 2
    columns = ("next_byte",)

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.float().transpose(1, 2), targets, reduction="none")
        return losses.mean(dim=1)

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return sum_columns(self.loss_per_image(outputs, targets))

    def metrics(self, totals: Tensor) -> dict[str, float]:
        loss = super().metrics(totals)["loss"]
        return {"loss": loss, "perplexity": math.exp(loss)}

    def table_rows(self, outputs: Tensor) -> list[tuple[str | float, ...]]:
        return [(repr(chr(byte)),) for byte in outputs[:, -1].argmax(dim=1).tolist()]
