"""Exponential moving average of a model's weights."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from runtime.process_group import local


class EMA:
    """Average of a model's weights and buffers, which follows them slowly.

    In each update average <- average + (1 - d) * (weight - average), where d is `decay`, but after
    n updates at most (1 + n) / (10 + n), for the average to forget the random start (as
    TensorFlow's ExponentialMovingAverage with `num_updates`). The first update copies. Counts, such
    as BatchNorm's of its batches, and buffers with infinite values, such as masks, have no average:
    they are the model's own tensors.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Copy the weights to where they are; a rank whose weights are shards copies its shards."""
        self.decay, self.num_updates = decay, 0
        tensors = [*model.parameters(), *model.buffers()]
        averages = {x: x.detach().clone() if has_average(x) else x for x in tensors}
        self.pairs = [(average, x) for x, average in averages.items() if average is not x]
        named = model.state_dict(keep_vars=True).items()
        self.named = {name: averages[x] for name, x in named if isinstance(x, Tensor)}
        self.averaged_buffers = [averages[buffer] for buffer in model.buffers()]

    def local_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's averages, each with the model's tensor."""
        return [(local(average), local(x)) for average, x in self.pairs]

    @torch.no_grad()
    def update(self) -> None:
        """Let the average follow the model, in one kernel, without waiting for the device."""
        n = self.num_updates
        decay = min(self.decay, (1 + n) / (10 + n)) if n else 0.0
        averages, weights = zip(*self.local_pairs(), strict=True)
        get_ema_multi_avg_fn(decay)(averages, weights, n)
        self.num_updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights and buffers with the averages; a second call undoes it."""
        for average, weight in self.local_pairs():
            if self.num_updates == 0:  # the weights may have been loaded after they were copied
                average.copy_(weight)
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def weights(self) -> dict[str, Tensor]:
        """Return the averages by the names of the model's `state_dict()`."""
        return self.named

    def buffers(self) -> list[Tensor]:
        """Return the averages of the model's buffers."""
        return self.averaged_buffers

    def state_dict(self) -> dict[str, Tensor]:
        averages = {f"module.{name}": average for name, average in self.named.items()}
        return {"n_averaged": torch.tensor(self.num_updates), **averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.num_updates = int(state["n_averaged"])
        for name, average in self.named.items():
            local(average).copy_(local(state[f"module.{name}"]))


def has_average(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point()
    return is_number and (tensor.requires_grad or bool(tensor.isfinite().all()))
