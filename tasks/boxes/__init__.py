"""The mean average precision of detections, from sums of fixed size.

Whether a detection is right depends on its image alone; only the order by score goes over all
images. What adds up over batches and ranks are therefore histograms of the scores.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.ops import box_iou

from tasks.common import count_of_each

IOUS = tuple(0.5 + 0.05 * number for number in range(10))
"""Least intersection over union of a detection with the box that it finds, as for COCO."""

NUM_BINS = 1000
"""Bins of the scores, from 0 to 1: detections whose scores differ by less have no order."""


def num_precision_sums(num_classes: int) -> int:
    """Return the length of `precision_sums()`."""
    return num_classes * (1 + (1 + len(IOUS)) * NUM_BINS)


def precision_sums(
    found: list[dict[str, Tensor]], true: list[dict[str, Tensor]], num_classes: int
) -> Tensor:
    """Return [boxes of each class, histograms of scores]: those of all detections, then those of
    the right ones at each IoU.

    Args:
        found: for each image, `boxes` (D, 4) as corners, `labels` (D,) in [0, num_classes) and
            `scores` (D,), the highest first.
        true: for each image, `boxes` (M, 4) and `labels` (M,).
        num_classes: number K of classes.

    Returns:
        (K + 11 * K * 1000,) float64.
    """
    labels, scores = (torch.cat([one[name] for one in found]) for name in ("labels", "scores"))
    cells = labels * NUM_BINS + (scores * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    positives = torch.cat([true_positives(*pair) for pair in zip(found, true, strict=True)])
    counts = [
        count_of_each(cells, num_classes * NUM_BINS, weights) for weights in (None, *positives.T)
    ]
    return torch.cat(
        [count_of_each(torch.cat([one["labels"] for one in true]), num_classes), *counts]
    )


def mean_average_precision(sums: Tensor, num_classes: int) -> dict[str, float]:
    """Return `map`, the mean over IOUS and over the classes that have boxes, and `map_50`, the same
    at the first IoU.

    The average precision is the mean of the precisions at COCO's 101 recalls; NaN without any box.
    """
    boxes, counts = sums[:num_classes].cpu(), sums[num_classes:].cpu()
    counts = counts.view(-1, num_classes, NUM_BINS)[:, boxes > 0].flip(2).cumsum(dim=2)
    precision = (counts[1:] / counts[:1].clamp(min=1)).flip(2).cummax(dim=2).values.flip(2)
    recall = counts[1:] / boxes[boxes > 0, None]
    recalls = torch.linspace(0, 1, 101, dtype=torch.float64).repeat(*recall.shape[:2], 1)
    # The precision at the first place that has the recall; 0 if there is none.
    means = pad(precision, (0, 1)).gather(2, torch.searchsorted(recall, recalls)).mean(dim=(1, 2))
    return {"map": float(means.mean()), "map_50": float(means[0])}


def true_positives(found: dict[str, Tensor], true: dict[str, Tensor]) -> Tensor:
    """Return 1 where a detection finds a box of its class that none with a higher score has found,
    else 0; (D, 10)."""
    iou = box_iou(found["boxes"], true["boxes"]) * (found["labels"][:, None] == true["labels"])
    least = torch.tensor(IOUS, device=iou.device)
    right, free = iou.new_zeros(len(iou), len(IOUS)), iou.new_ones(len(IOUS), iou.shape[1])
    for number in range(len(iou) if iou.shape[1] else 0):
        best, box = (iou[number] * free).max(dim=1)
        right[number] = best >= least
        free[torch.arange(len(IOUS)), box] -= right[number]
    return right
