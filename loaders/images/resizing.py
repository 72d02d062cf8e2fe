"""Resizing, the same for batches, packs and shards."""

import numpy as np
import torch
from torch.nn.functional import interpolate


def resize(image: np.ndarray, size: tuple[int, int], interpolation: str = "linear") -> np.ndarray:
    """An image in another size: bilinear with antialiasing, or the nearest pixels.

    Args:
        image: (H, W, C) uint8 or uint16.
        size: (height, width) in pixels.
        interpolation: `linear` or `nearest`.

    Returns:
        (height, width, C) of the image's dtype; the image itself if it has the size.
    """
    if image.shape[:2] == size:
        return image
    if (
        interpolation == "nearest"
    ):  # the pixel of the image in which the centre of each new one lies
        lines, columns = (
            ((2 * np.arange(new) + 1) * old) // (2 * new)
            for new, old in zip(size, image.shape, strict=False)
        )
        return image[lines[:, None], columns]
    # The leading dimension comes first: only so does torch see channels_last.
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    if image.dtype == np.uint16:  # which torch cannot resize
        pixels = pixels.float()
    # Lines cost torch more than columns: the fewer of them it resizes, the better.
    if size[0] < image.shape[0]:
        pixels = interpolate(pixels, (size[0], image.shape[1]), mode="bilinear", antialias=True)
    pixels = interpolate(pixels, size, mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    return (pixels.round().to(torch.uint16) if image.dtype == np.uint16 else pixels).numpy()
