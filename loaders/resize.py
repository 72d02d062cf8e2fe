"""Whole images in another size, ahead of training."""

import numpy as np
import torch
from torch.nn.functional import interpolate

from loaders.execute import nearest
from loaders.index import Index, Side


def read_resized(
    index: Index, sample: int, side: int, size: np.ndarray, reduces: bool
) -> np.ndarray:
    """(height, width, C) uint8 or uint16: an image in the size that its input shall have.

    Args:
        index, sample, side: which image.
        size: (2,) height and width of the input in pixels; those of a larger target follow.
        reduces: whether large JPEGs are decoded at a fraction of their size.

    Raises:
        BadFileError, StorageError, OSError, MemoryError: as `Index.read`.
    """
    kind = index.sides[side]
    height, width = (kind.size_factor * int(length) for length in size)
    lines, columns = (kind.size_factor * int(length) for length in index.sizes[sample])
    image = index.read_rectangle(
        sample, side, (0, 0, lines, columns), (height, width) if reduces else None
    )
    return resized(image, height, width, kind)


def resized(image: np.ndarray, height: int, width: int, side: Side) -> np.ndarray:
    """A (H, W, C) uint8 or uint16 image in another size: linear with antialiasing, or nearest."""
    if image.shape[:2] == (height, width):
        return image
    if side.interpolation == "nearest":
        return nearest(image, (height, width))
    tensor = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    if image.dtype == np.uint16:
        tensor = tensor.float()
    tensor = interpolate(tensor, (height, width), mode="bilinear", antialias=True)
    return tensor[0].permute(1, 2, 0).round().numpy().astype(image.dtype)
