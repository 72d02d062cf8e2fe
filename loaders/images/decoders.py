"""Decoding the bytes of photos without DALI."""

import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image, ImageOps

from loaders.images.resizing import FLIPPED

JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n\x1a\n"
# Places in a PNG: its header with the checksum, and in it the height and the kind of pixels.
PNG_HEADER, PNG_CHECKSUM = slice(12, 29), slice(29, 33)
PNG_HEIGHT, PNG_PIXELS = slice(20, 24), slice(24, 29)
PLAIN_RGB = b"\x08\x02\0\0\0"  # 8 bits, RGB, compression, filter, not interlaced

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats that Pillow may read, whatever a file's name; for EPS it would start Ghostscript."""

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


def decode_photo(
    content: bytes | bytearray, header: np.void, num_lines: int | None, factor: int
) -> np.ndarray:
    """(height, width, 3, or 1 if the header says so) uint8, upright; arguments as of `decode`.

    Raises:
        OSError: it is no image or is cut short.
    """
    image = _decode_rgb(content, header, num_lines, factor)
    if header["channels"] == 1:  # the model takes grey images
        image = np.array(Image.fromarray(image).convert("L"))[..., None]
    return image


def _decode_rgb(
    content: bytes | bytearray, header: np.void, num_lines: int | None, factor: int
) -> np.ndarray:
    """(height, width, 3) uint8, upright; grey, palette, CMYK and alpha become RGB."""
    orientation = int(header["orientation"])
    # Pillow reads some files that libjpeg and libspng refuse, and says what is damaged.
    if content.startswith(JPEG_START):
        width = int(header["width" if orientation < 5 else "height"])  # as stored
        least = -(-width // factor) if factor > 1 else 0
        with suppress(ValueError):
            return _upright(simplejpeg.decode_jpeg(content, min_width=least), orientation)
    if orientation == 1 and is_plain_rgb_png(content):
        with suppress(SpngError):
            return spng_decode(
                content if num_lines is None else upper_png_lines(content, num_lines)
            )
    with Image.open(BytesIO(content), formats=FORMATS) as stored:
        # Either of the two would copy the image also where there is nothing to do.
        image = stored if orientation == 1 else ImageOps.exif_transpose(stored)
        if stored.mode.startswith("I;16"):  # convert() would clip 16 bits instead of scaling them
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def is_plain_rgb_png(content: bytes | bytearray) -> bool:
    """True for a PNG of 8-bit RGB whose lines are stored in order."""
    return content.startswith(PNG_START) and content[PNG_PIXELS] == PLAIN_RGB


def upper_png_lines(content: bytes | bytearray, num_lines: int) -> bytes | bytearray:
    """The same PNG with a height of `num_lines` in its header, where libspng stops.

    A crop needs only the lines above its lower edge: without the others `loader=pytorch` is 1.4 times as fast on
    1280x720 PNG pairs cropped to 256 (36 pairs/s against 26 on two cores, `benchmarks alternatives cases=deblur`).
    libspng would not see damage in the rest of the last chunk, so all checksums are compared here.

    Returns:
        The content itself if all lines are needed or a checksum is wrong.
    """
    if num_lines >= int.from_bytes(content[PNG_HEIGHT]):
        return content
    at, view = len(PNG_START), memoryview(content)
    while at < len(content):
        end = at + 8 + int.from_bytes(view[at : at + 4])
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + 4]):
            return content
        at = end + 4
    upper = bytearray(content)
    upper[PNG_HEIGHT] = num_lines.to_bytes(4)
    upper[PNG_CHECKSUM] = zlib.crc32(upper[PNG_HEADER]).to_bytes(4)
    return upper


def _upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """(height, width, C) as stored, turned as EXIF numbers it."""
    if orientation == 1:
        return stored
    image = stored.swapaxes(0, 1) if orientation >= 5 else stored
    flipped = tuple(axis for axis in (0, 1) if orientation in FLIPPED[axis])
    return np.ascontiguousarray(np.flip(image, flipped))
