"""Partial decoding of photos: only the pixels that a rectangle needs.

A JPEG that is much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size: libjpeg computes
fewer pixels of each block of 8x8, each about the mean of a square of the whole image. The result is
resized to the size needed as usual. A PNG is decoded down to the last line of the rectangle.
"""

import math
import zlib
from contextlib import suppress

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image

from loaders.images.decoders import FLIPPED, as_indexed, is_plain_rgb_png, resize, upright
from loaders.images.headers import JPEG_START, PNG_START

FACTORS = (8, 4, 2)  # decoding at 5/8 to 7/8 takes longer than at full size
MARGIN = 1.25
"""18 photographs of 1 to 18 megapixels at 224x224 differ from whole decoding by 0.45 of 255 (mean)
and 17 (maximum); margin 1: 0.91 and 57; margin 2: 0.33 and 17; DALI's resizing: 0.09 and 13."""
# Places in a PNG: its header with the checksum, and in it the height.
PNG_HEADER, PNG_CHECKSUM, PNG_HEIGHT = slice(12, 29), slice(29, 33), slice(20, 24)


def decode_partly(
    content: bytes | bytearray,
    header: np.void,
    rectangle: tuple[int, int, int, int],
    size: tuple[int, int],
    reduces: bool,
) -> np.ndarray | None:
    """Decode and resize a rectangle of a photo, (H, W, C) uint8; None: all pixels are needed.

    Args:
        content: content of the file.
        header: header of the image, of dtype `HEADER`.
        rectangle: y, x, height and width in pixels of the upright image.
        size: (height, width) in pixels of the result.
        reduces: decode a JPEG at a fraction of its size where that is enough.
    """
    y, x, height, width = rectangle
    factor = factor_for((height, width), size) if reduces else 1
    if factor > 1 and content.startswith(JPEG_START):
        return _decode_reduced(content, header, rectangle, size, factor)
    if header["orientation"] == 1 and is_plain_rgb_png(content):
        upper = upper_png_lines(content, y + height)
        with suppress(SpngError):
            image = None if upper is None else as_indexed(spng_decode(upper), header)
            if image is not None and image.shape[:2] == (y + height, header["width"]):
                return resize(image[y:, x : x + width], size)
    return None


def _decode_reduced(
    content: bytes | bytearray,
    header: np.void,
    rectangle: tuple[int, int, int, int],
    size: tuple[int, int],
    factor: int,
) -> np.ndarray | None:
    """Decode a JPEG at 1 / `factor` of its size; see `decode_partly`."""
    orientation = int(header["orientation"])
    whole = np.array([header["height"], header["width"]], int)
    stored_width = int(whole[1 if orientation < 5 else 0])
    try:
        image = simplejpeg.decode_jpeg(content, min_width=-(-stored_width // factor))
    except ValueError:  # Pillow may read it, or says what is damaged
        return None
    image = as_indexed(upright(image, orientation), header)
    reduced = np.array(image.shape[:2])
    if (reduced != -(-whole // factor)).any():
        return None
    # The last pixel as stored may lie partly outside the image; flipped, it is the first one.
    outside = np.where([orientation in axis for axis in FLIPPED], factor * reduced - whole, 0)
    top, left = start = (outside + rectangle[:2]) / factor
    bottom, right = start + np.array(rectangle[2:]) / factor
    y, x = int(top), int(left)
    used = image[y : math.ceil(bottom), x : math.ceil(right)]
    photo = Image.fromarray(used[..., 0] if used.shape[2] == 1 else used)
    inside = (left - x, top - y, right - x, bottom - y)
    resized = photo.resize(size[::-1], Image.Resampling.BILINEAR, inside)
    return np.array(resized).reshape(*size, -1)


def upper_png_lines(content: bytes | bytearray, num_lines: int) -> bytearray | None:
    """Return the PNG with a height of `num_lines` in its header, where libspng stops.

    A crop needs only the lines above its lower edge: with these alone `loader=pytorch` is 1.4 times
    as fast on 1280x720 PNG pairs cropped to 256 (`benchmarks alternatives cases=deblur`: 36 instead
    of 26 pairs/s on two cores). All checksums are compared: libspng would not see later damage.

    Returns:
        None if all lines are needed or a checksum is wrong.
    """
    if num_lines >= int.from_bytes(content[PNG_HEIGHT]):
        return None
    at, view = len(PNG_START), memoryview(content)
    while at < len(content):
        end = at + 8 + int.from_bytes(view[at : at + 4])
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + 4]):
            return None
        at = end + 4
    upper = bytearray(content)
    upper[PNG_HEIGHT] = num_lines.to_bytes(4)
    upper[PNG_CHECKSUM] = zlib.crc32(upper[PNG_HEADER]).to_bytes(4)
    return upper


def factor_for(shape: tuple[int, int], size: tuple[int, int]) -> int:
    """Return the largest factor by which a rectangle of `shape` (height, width) can be reduced and
    still be MARGIN times as large as `size` in both directions."""
    most = min(shape[0] / size[0], shape[1] / size[1]) / MARGIN
    return 1 if most < FACTORS[-1] else next(factor for factor in FACTORS if factor <= most)
