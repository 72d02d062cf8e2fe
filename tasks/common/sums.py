"""Sums over images, and means computed from them.

Metrics travel as sums with the number of images in front: adding the sums of batches and
ranks, whatever their sizes, gives the metrics of the whole data set.
"""

import torch
from torch import Tensor


def sum_columns(*columns: Tensor) -> Tensor:
    """Return [N, sum of each (N,) column], (1 + number of columns,) float64."""
    # A tensor made from the number N would be copied to the device, and wait for it.
    count = torch.ones_like(columns[0])
    return torch.stack([column.double() for column in (count, *columns)]).sum(dim=1)


def count_of_each(indices: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
    """Count each index in [0, size), or add up its weights; (size,) float64.

    Unlike `torch.bincount`, this does not wait for the device.
    """
    ones = torch.ones_like(indices, dtype=torch.float64) if weights is None else weights.double()
    counts = torch.zeros(size, dtype=torch.float64, device=indices.device)
    return counts.index_add_(0, indices.flatten(), ones.flatten())


def divide_by_count(names: tuple[str, ...], totals: Tensor) -> dict[str, float]:
    """Return the means of `[count, *sums, ...]`, one for each name; waits for the device."""
    count, *sums = totals[: 1 + len(names)].tolist()
    if count == 0:
        raise ValueError("totals have 0 images; evaluate at least one, or sum over all ranks first")
    return {name: value / count for name, value in zip(names, sums, strict=True)}
