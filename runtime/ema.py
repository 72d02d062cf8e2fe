"""How averaged weights follow the trained ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def ema_multi_avg_fn(decay: float) -> Callable[..., None]:
    """For `AveragedModel`: average <- average + (1 - d) * (weights - average).

    d is `decay`, but in the first steps at most (1 + n) / (10 + n) after n of them, so that the average
    forgets the random start (as TensorFlow's ExponentialMovingAverage with `num_updates`).
    """

    @torch.no_grad()
    def update(averages: Any, weights: Any, num_averaged: Tensor) -> None:
        if not averages[0].is_floating_point():  # counts, such as BatchNorm's
            torch._foreach_copy_(averages, weights)
            return
        # Of weights that are split over ranks, each rank averages its part.
        averages, weights = (
            [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
            for tensors in (averages, weights)
        )
        step = (1 - (1 + num_averaged) / (10 + num_averaged)).clamp(min=1 - decay)
        changes = torch._foreach_sub(weights, averages)
        torch._foreach_mul_(changes, step)
        torch._foreach_add_(averages, changes)

    return update
