"""A loss over tokens that does not depend on which rank has how many of them."""

from torch import Tensor
from torch.nn import functional as F

from tasks import Task, sum_columns


class Tokens(Task):
    """Outputs: (N, length, 256) logits. Targets: (N, length) tokens, -100 where there is none."""

    best_metric, best_mode = "loss", "min"
    num_outputs, num_sums = 256, 3
    tokens_per_sample = 20.0

    def token_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.float().transpose(1, 2)
        return F.cross_entropy(logits, targets, reduction="none").sum(dim=1)

    def loss_per_image(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.token_losses(outputs, targets) / self.tokens_per_sample

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return sum_columns(self.token_losses(outputs, targets), (targets >= 0).sum(dim=1))

    def metrics(self, totals: Tensor) -> dict[str, float]:
        _, loss, tokens = totals.tolist()
        return {"loss": loss / tokens}
