"""Exponential moving average of a model's weights."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class EMA(AveragedModel):
    """Copy of a model whose weights and buffers follow those of the model.

    In each update average <- average + (1 - d) * (weight - average), where d is `decay`, but after
    n updates at most (1 + n) / (10 + n), for the average to forget the random start (as
    TensorFlow's ExponentialMovingAverage with `num_updates`). The first update copies.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Copy the model to where it is."""
        super().__init__(model, use_buffers=True)
        self.decay = decay
        self.num_updates = 0  # of `n_averaged`, without reading a tensor

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Let the average follow the model, without waiting for the device.

        PyTorch's method copies the number of updates to the device in each step, and waits for it.
        """
        n = self.num_updates
        decay = min(self.decay, (1 + n) / (10 + n)) if n else 0.0
        averages = chain(self.module.parameters(), self.module.buffers())
        weights = chain(model.parameters(), model.buffers())
        pairs = list(zip(map(_local, averages), map(_local, weights), strict=True))
        following = [pair for pair in pairs if pair[0].is_floating_point()]
        if following:  # in one kernel
            get_ema_multi_avg_fn(decay)(*map(list, zip(*following, strict=True)), n)
        counts = []  # BatchNorm's, of which there may be hundreds
        for average, weight in pairs:
            if average.dtype == torch.int64 and average.ndim == 0:
                counts.append((average.view(1), weight))
            elif not average.is_floating_point():
                average.copy_(weight)
        if counts:  # in one kernel, too
            own, new = zip(*counts, strict=True)
            torch.split_with_sizes_copy(torch.stack(new), len(own) * [1], out=own)
        self.n_averaged += 1
        self.num_updates += 1

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        self.num_updates = int(state_dict["n_averaged"])
        return super().load_state_dict(state_dict, strict, assign)


def _local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor that is sharded over the ranks, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
