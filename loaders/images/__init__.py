"""From the bytes of image files to pixels.

What a file's pixels become is of a kind, `ImageSpec.content`, which has a file here with two
functions: `read_header(file, data)` returns the `Header`, and `decode(content, header, num_lines,
factor)` the pixels as stored, (height, width, channels), of which `num_lines` at the top or, of a
JPEG, 1 / `factor` of the size are enough. Damaged files make both raise errors of any type.
"""

import math
import os
import stat
from importlib import import_module

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from conf.schema import DataConfig
from loaders.images.headers import HEADER, PNG_START, Content, Header, reason_of
from loaders.targets import ImageSpec

FACTORS = (8, 4, 2)  # decoding at 5/8 to 7/8 takes longer than at full size
MARGIN = 1.25
"""18 photographs of 1 to 18 megapixels at 224x224 differ from whole decoding by 0.45 of 255 (mean)
and 17 (maximum); margin 1: 0.91 and 57; margin 2: 0.33 and 17; DALI's resizing: 0.09 and 13."""
FLIPPED = ((3, 4, 7, 8), (2, 3, 6, 7))
"""EXIF orientations that need the lines, and those that need the columns, flipped to be upright;
from 5 on, both are exchanged before."""

Rectangle = tuple[int, int, int, int]
"""y, x, height and width in pixels."""


def read_header(path: str, kind: str, data: DataConfig) -> Header:
    """Read the header of an image file.

    Raises:
        OSError: the file cannot be read or is not an image.
        ValueError: it is too large, or its pixels cannot become those of the kind.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
        raise OSError("it is a folder, pipe, socket or device")
    with open(path, "rb") as file:
        if not file.read(1):
            raise OSError("empty file")
        file.seek(0)
        header: Header = import_module(f"loaders.images.{kind}").read_header(file, data)
    return header


def decode_resized(
    content: Content,
    header: np.void,
    spec: ImageSpec,
    rectangle: Rectangle,
    size: tuple[int, int],
    reduces: bool,
) -> np.ndarray:
    """Decode and resize a rectangle of the upright image, (*size, channels).

    If it `reduces`, a JPEG is decoded at the smallest of the sizes 1/2, 1/4 and 1/8 at which the
    rectangle is still MARGIN times as large as `size` in both directions: libjpeg computes fewer
    pixels of each block of 8x8, each about the mean of a square of the whole image.
    """
    if not content:
        raise OSError("empty file")
    y, x, height, width = rectangle
    most = min(height / size[0], width / size[1]) / MARGIN
    factor = next((factor for factor in FACTORS if factor <= most and reduces), 1)
    decode = import_module(f"loaders.images.{spec.content}").decode
    image = _upright(decode(content, header, y + height, factor), header)
    whole = int(header["height"]), int(header["width"])
    reduced = -(-whole[0] // factor), -(-whole[1] // factor)
    if image.shape[:2] not in (whole, (y + height, whole[1]), reduced):
        found, expected = ("{}x{}".format(*shape) for shape in (image.shape, whole))
        raise OSError(f"{found} pixels but {expected} when it was indexed")
    if image.shape[1] != whole[1]:
        return _resize_reduced(image, header, factor, rectangle, size)
    return resize(image[y : y + height, x : x + width], size, spec.interpolation)


def _upright(stored: np.ndarray, header: np.void) -> np.ndarray:
    """Turn a stored image, (height, width, C), upright by its EXIF orientation."""
    orientation = int(header["orientation"])
    if orientation == 1:
        return stored
    image = stored.swapaxes(0, 1) if orientation >= 5 else stored
    flipped = tuple(axis for axis in (0, 1) if orientation in FLIPPED[axis])
    return np.ascontiguousarray(np.flip(image, flipped))


def _resize_reduced(
    image: np.ndarray, header: np.void, factor: int, rectangle: Rectangle, size: tuple[int, int]
) -> np.ndarray:
    """Resize a rectangle, in pixels of the whole image, of one that was decoded at 1 / factor."""
    whole, reduced = np.array([header["height"], header["width"]], int), np.array(image.shape[:2])
    # The last pixel as stored may lie partly outside the image; flipped, it is the first one.
    is_flipped = [header["orientation"] in orientations for orientations in FLIPPED]
    outside = np.where(is_flipped, factor * reduced - whole, 0)
    top, left = start = (outside + rectangle[:2]) / factor
    bottom, right = start + np.array(rectangle[2:]) / factor
    y, x = int(top), int(left)
    used = image[y : math.ceil(bottom), x : math.ceil(right)]
    photo = Image.fromarray(used[..., 0] if used.shape[2] == 1 else used)
    inside = (left - x, top - y, right - x, bottom - y)
    resized = photo.resize(size[::-1], Image.Resampling.BILINEAR, inside)
    return np.array(resized).reshape(*size, -1)


def resize(image: np.ndarray, size: tuple[int, int], interpolation: str = "linear") -> np.ndarray:
    """Resize an image (H, W, C) of uint8 or uint16 to (*size, C): `linear` with antialiasing, or to
    the `nearest` pixels. An image of this size is returned itself."""
    if image.shape[:2] == size:
        return image
    if interpolation == "nearest":
        # The pixel of the image in which the centre of each new one lies.
        lines, columns = (
            ((2 * np.arange(new) + 1) * old) // (2 * new)
            for new, old in zip(size, image.shape, strict=False)
        )
        return image[lines[:, None], columns]
    # The leading dimension comes first: only so does torch see channels_last. Done by torch, each
    # of these steps would give up the interpreter's lock.
    pixels = torch.from_numpy(image.reshape(1, *image.shape).transpose(0, 3, 1, 2))
    if image.dtype == np.uint16:
        pixels = pixels.float()  # torch cannot resize uint16
    pixels = interpolate(pixels, size, mode="bilinear", antialias=True)
    if image.dtype == np.uint16:
        pixels = pixels.round().to(torch.uint16)
    return pixels.numpy()[0].transpose(1, 2, 0)
