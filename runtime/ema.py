"""Exponential moving average of a model's weights."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class EMA(AveragedModel):
    """Copy of a model whose weights and buffers follow those of the model.

    In each update average <- average + (1 - d) * (weight - average), where d is `decay`, but after n updates
    at most (1 + n) / (10 + n), for the average to forget the random start (as TensorFlow's
    ExponentialMovingAverage with `num_updates`). The first update copies.
    """

    def __init__(self, model: nn.Module, decay: float, device: torch.device) -> None:
        """Copy the model to the device."""
        super().__init__(model, use_buffers=True)
        self.decay = decay
        self.module.to(device)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Let the average follow the model, without waiting for the device.

        The method of PyTorch copies the number of updates to the device in each step, and waits for that.
        """
        n = int(self.n_averaged)  # lies on the host
        step = 1 - min(self.decay, (1 + n) / (10 + n)) if n else 1.0
        averages = chain(self.module.parameters(), self.module.buffers())
        weights = chain(model.parameters(), model.buffers())
        for average, weight in zip(map(_local, averages), map(_local, weights), strict=True):
            if average.is_floating_point():
                average.lerp_(weight, step)
            else:  # a count, such as BatchNorm's
                average.copy_(weight)
        self.n_averaged += 1


def _local(tensor: Any) -> Tensor:
    """This rank's shard of a tensor that is split over the ranks, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
