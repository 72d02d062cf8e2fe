"""Colours of classes, for drawings and files of masks."""

import colorsys

import numpy as np
import torch
from torch import Tensor

from tasks.common.pictures import floats


def class_colours(num_classes: int) -> np.ndarray:
    """Return one colour per class, (num_classes, 3) uint8; the first is black, for background."""
    golden = 0.618033988749895  # each hue far from those before it
    colours = [
        colorsys.hsv_to_rgb(number * golden % 1, 0.5 + 0.5 * (number % 2), 1 - 0.2 * (number % 3))
        for number in range(num_classes)
    ]
    return (255 * np.array([(0, 0, 0), *colours[1:]])).round().astype(np.uint8)


def coloured(indices: Tensor, colours: np.ndarray) -> Tensor:
    """Draw class indices (N, H, W) in the colours of the classes, others in white; (N, 3, H, W)."""
    table = np.concatenate([colours, np.full((1, 3), 255, np.uint8)])
    indices = indices.cpu()
    is_class = (indices >= 0) & (indices < len(colours))
    return floats(table[torch.where(is_class, indices, len(colours)).numpy()])
