"""Resizing, the same for batches, packs and shards.

A JPEG that is much larger than what is asked for is decoded at 1/2, 1/4 or 1/8 of its size.

libjpeg then computes fewer pixels of each block of 8x8, and a pixel of the reduced image is about the
mean of a square of the whole one. What is left to the asked-for size is resized as usual.
"""

import math

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

Box = tuple[float, float, float, float]
"""Top, left, bottom and right edge of a rectangle, in pixels of an image; fractions are parts of pixels."""

FACTORS = (8, 4, 2)  # decoding at 5/8 to 7/8 takes longer than at full size
MARGIN = 1.25
"""Against whole decoding, 18 photographs of 1 to 18 megapixels at 224x224 differ by 0.45 of 255 on average
and 17 at most; with a margin of 1 by 0.91 and 57, of 2 by 0.33 and 17. DALI's resizing differs by 0.09 and 13."""
FLIPPED = ((3, 4, 7, 8), (2, 3, 6, 7))
"""The EXIF orientations with which an upright image is one whose lines, and whose columns, are flipped;
from 5 on, both are exchanged before."""


def resize(
    image: np.ndarray, size: tuple[int, int], interpolation: str = "linear", box: Box | None = None
) -> np.ndarray:
    """Resize an image, or a box of it: bilinear with antialiasing, or to the nearest pixels.

    Args:
        image: (H, W, C) uint8 or uint16.
        size: (height, width) in pixels.
        interpolation: `linear` or `nearest`.
        box: rectangle of a uint8 image that is interpolated linearly; it may have fractions of pixels.

    Returns:
        (height, width, C) of the image's dtype; the image itself if it has the size.
    """
    if box is not None:
        return _resize_box(image, size, box)
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


def _resize_box(image: np.ndarray, size: tuple[int, int], box: Box) -> np.ndarray:
    top, left, bottom, right = box
    y, x = int(top), int(left)
    used = image[y : math.ceil(bottom), x : math.ceil(right)]
    stored = Image.fromarray(used[..., 0] if used.shape[2] == 1 else used)
    inside = (left - x, top - y, right - x, bottom - y)
    resized = stored.resize(size[::-1], Image.Resampling.BILINEAR, inside)
    return np.array(resized).reshape(*size, -1)


def factor_for(shape: tuple[int, int], size: tuple[int, int]) -> int:
    """Return the largest factor by which a rectangle of `shape` (height, width) can be reduced and
    still be MARGIN times as large as `size` in both directions."""
    most = min(length / new for length, new in zip(shape, size, strict=True)) / MARGIN
    return next((factor for factor in FACTORS if factor <= most), 1)


def reduced_shape(shape: tuple[int, int], factor: int) -> tuple[int, int]:
    """Return (height, width) of an image of this shape that was decoded at 1 / `factor` of its
    size."""
    return -(-shape[0] // factor), -(-shape[1] // factor)


def reduced_box(
    shape: tuple[int, ...],
    whole: tuple[int, int],
    factor: int,
    orientation: int,
    rectangle: tuple[int, int, int, int],
) -> Box:
    """Return the box of the reduced image that corresponds to a rectangle of the whole one.

    Args:
        shape: (height, width) of the reduced image, upright.
        whole: (height, width) of the upright image before it was reduced.
        factor: factor by which it was reduced.
        orientation: EXIF orientation of the file.
        rectangle: y, x, height and width in pixels of the whole image.
    """
    starts, ends = [], []
    for axis in (0, 1):
        # The last pixel as stored may lie partly outside the image; flipped, it is the first one.
        is_flipped = orientation in FLIPPED[axis]
        outside = factor * shape[axis] - whole[axis] if is_flipped else 0
        starts.append((rectangle[axis] + outside) / factor)
        ends.append(starts[axis] + rectangle[2 + axis] / factor)
    return starts[0], starts[1], ends[0], ends[1]
