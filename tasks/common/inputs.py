"""Pictures of what goes into the training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tasks.common.palette import class_colours, coloured
from tasks.common.pictures import as_pictures, shares_text, with_captions


def with_targets(
    pictures: Tensor, targets: Any, target: Any, value_range: Sequence[float]
) -> dict[str, Tensor]:
    """Draw inputs of the training with their targets: below them, or images of their own.

    Args:
        pictures: (N, 1 or 3, H, W) in [0, 1].
        targets: their targets, as the loader yields them.
        target: their kind, a `loaders.targets.Target`, or None.
        value_range: values of black and full intensity in target images.
    """
    kind = target.kind if target and isinstance(targets, Tensor) else ""
    names: tuple[str, ...] = getattr(target, "classes", ())
    if kind == "masks":
        indices = torch.where(targets == target.ignore_index, -1, targets)
        return {"inputs": pictures, "targets": coloured(indices, class_colours(len(names)))}
    if kind == "images":
        low, high = value_range
        return {"inputs": pictures, "targets": as_pictures((targets - low) / (high - low))}
    if kind == "labels" and targets.ndim == 1:
        named = dict(enumerate(names))  # data of your own may have others, which have no loss
        texts = [named.get(label, str(label)) for label in targets.tolist()]
    elif kind in ("labels", "several labels") and targets.shape[1:] == (len(names),):
        texts = [shares_text(row, names) for row in targets]
    elif kind == "numbers" and targets.ndim == 2:
        texts = [", ".join(f"{number:.4g}" for number in row) for row in targets.tolist()]
    else:
        return {"inputs": pictures}
    return {"inputs": with_captions(pictures, [[(text, "white")] for text in texts])}
