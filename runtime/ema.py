"""Exponential moving average of a model's weights."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from runtime.shards import local


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
        copies = {
            tensor: tensor.detach().clone() if has_average(tensor) else tensor
            for tensor in tensors_in(model)
        }
        self.averages = list(copies.values())
        named = model.state_dict(keep_vars=True).items()
        self.named = {name: copies[x] for name, x in named if isinstance(x, Tensor)}
        self.averaged_buffers = [copies[buffer] for buffer in model.buffers()]

    def _pairs(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's averages, each with the model's tensor."""
        pairs = zip(self.averages, tensors_in(model), strict=True)
        return [(local(mean), local(x)) for mean, x in pairs if mean is not x]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Let the average follow the model, in one kernel, without waiting for the device."""
        n = self.num_updates
        decay = min(self.decay, (1 + n) / (10 + n)) if n else 0.0
        averages, weights = zip(*self._pairs(model), strict=True)
        get_ema_multi_avg_fn(decay)(averages, weights, n)
        self.num_updates += 1

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange the model's weights and buffers with the averages; a second call undoes it."""
        for average, weight in self._pairs(model):
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
    """Return True for parameters and buffers of numbers."""
    is_number = tensor.is_floating_point()
    return is_number and (tensor.requires_grad or bool(tensor.isfinite().all()))


def tensors_in(model: nn.Module) -> Iterator[Tensor]:
    """Return a model's parameters and buffers, each once."""
    return chain(model.parameters(), model.buffers())
