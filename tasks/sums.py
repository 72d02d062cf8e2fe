"""Sums over images, from which means follow.

Metrics travel as sums with the number of images in front, so that adding the sums of batches and
ranks, whatever their sizes, gives the metrics of the whole data set.
"""

import torch
from torch import Tensor


def sum_columns(*columns: Tensor) -> Tensor:
    """[N, sum of each (N,) column] in float64."""
    # A tensor made from the number N would be copied to the device, and wait for it.
    count = torch.ones_like(columns[0])
    return torch.stack([column.double() for column in (count, *columns)]).sum(dim=1)


def divide_by_count(names: tuple[str, ...], totals: Tensor) -> dict[str, float]:
    """The means of `[count, *sums]` by name; waits for the device."""
    count, *sums = totals.tolist()
    if count == 0:
        raise ValueError("totals have 0 images; evaluate at least one, or sum over all ranks first")
    return {name: value / count for name, value in zip(names, sums, strict=True)}
