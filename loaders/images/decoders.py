"""Decoding the bytes of image files without DALI."""

import errno
import math
import zlib
from contextlib import suppress
from io import BytesIO
from typing import BinaryIO

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image, ImageOps, UnidentifiedImageError

from loaders.images.resizing import FLIPPED, factor_for, reduced_box, reduced_shape, resize

JPEG_START = b"\xff\xd8\xff"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_START = b"\x89PNG\r\n\x1a\n"
# Places in a PNG: its header with the checksum, and in it the height and the kind of pixels.
PNG_HEADER, PNG_CHECKSUM = slice(12, 29), slice(29, 33)
PNG_HEIGHT, PNG_BITS, PNG_PIXELS = slice(20, 24), 24, slice(24, 29)
PLAIN_RGB = b"\x08\x02\0\0\0"  # 8 bits, RGB, compression, filter, not interlaced

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats that Pillow may read, whatever a file's name; for EPS it would start Ghostscript."""

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


def decode(
    content: bytes | bytearray,
    header: np.void,
    kind: str,
    num_lines: int | None = None,
    factor: int = 1,
) -> np.ndarray:
    """Pixels of an image: (height, width, channels) as its header says, upright.

    A damaged file makes decoders raise errors of any type; `reason_of` puts them into words.

    Args:
        content: of the file.
        header: of the image, of dtype `HEADER`; photos become grey if it has one channel.
        kind: `rgb`, `stored` or `indices`, as `loaders.index.ImageSpec.content`.
        num_lines: upper lines that are needed; others may be missing.
        factor: 2, 4 or 8 where a JPEG may have the shape `reduced_shape()` instead.
    """
    if not content:
        raise OSError("empty file")
    whole = (int(header["height"]), int(header["width"]))
    upper = (min(num_lines or whole[0], whole[0]), whole[1])
    if kind == "stored":
        image = decode_tiff(content, header)
    elif kind == "indices":
        image = decode_mask(content, int(header["orientation"]))
    else:
        image = decode_photo(content, header, num_lines, factor)
        if header["channels"] == 1:  # the model takes grey images
            image = np.array(Image.fromarray(image).convert("L"))[..., None]
    if image.shape[:2] not in {
        reduced_shape(shape, f) for shape in (whole, upper) for f in (1, factor)
    }:
        raise OSError(
            f"{image.shape[0]}x{image.shape[1]} pixels but {whole[0]}x{whole[1]} when it was indexed"
        )
    return image


def decode_resized(
    content: bytes | bytearray,
    header: np.void,
    kind: str,
    rectangle: tuple[int, int, int, int],
    size: tuple[int, int],
    interpolation: str = "linear",
    reduces: bool = False,
) -> np.ndarray:
    """(height, width, channels) of a rectangle of an image, resized; errors as of `decode`.

    Args:
        content, header, kind: as of `decode`.
        rectangle: y, x, height and width in pixels of the upright image.
        size: (height, width) in pixels of the result.
        interpolation: `linear` or `nearest`.
        reduces: whether a JPEG is decoded at a fraction of its size where that is enough.
    """
    y, x, height, width = rectangle
    factor = factor_for((height, width), size) if reduces and kind == "rgb" else 1
    image = decode(content, header, kind, y + height, factor)
    whole = int(header["height"]), int(header["width"])
    if image.shape[1] < whole[1]:  # a JPEG that was reduced
        box = reduced_box(image.shape, whole, factor, header["orientation"], rectangle)
        return resize(image, size, box=box)
    return resize(image[y : y + height, x : x + width], size, interpolation)


def decode_photo(
    content: bytes | bytearray, header: np.void, num_lines: int | None, factor: int
) -> np.ndarray:
    """(height, width, 3) uint8, upright; grey, palette, CMYK and alpha become RGB. Arguments as of `decode`.

    Raises:
        OSError: it is no image or is cut short.
    """
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


def decode_tiff(content: bytes | bytearray, header: np.void) -> np.ndarray:
    """(height, width, channels) uint8 or uint16, as stored."""
    dtype = np.dtype(np.uint16 if header["bits"] == 16 else np.uint8)
    shape = (int(header["height"]), int(header["width"]), int(header["channels"]))
    if header["raw_offset"] >= 0:
        start, num_bytes = int(header["raw_offset"]), math.prod(shape) * dtype.itemsize
        if len(content) < start + num_bytes:
            raise OSError("it is cut short")
        pixels = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
        return np.require(pixels, requirements=["A", "W"])
    from tifffile import imread

    image = imread(BytesIO(content), maxworkers=1)  # other threads read other files
    if image.shape != shape[: image.ndim]:
        image = np.moveaxis(image, 0, -1)
    return np.ascontiguousarray(image.reshape(shape), dtype)


def read_raw(file: BinaryIO, start: int, image: np.ndarray) -> None:
    """Read the uncompressed pixels of a TIFF into an array of their shape.

    It is 1.9 times as fast as reading the file and `decode` (5 channels of 50x50).

    Args:
        file: the TIFF.
        start: `Header.raw_offset`.
        image: (height, width, channels) to read into.

    Raises:
        OSError: the file ends before.
    """
    file.seek(start)
    if file.readinto(image.data) < image.nbytes:  # type: ignore[attr-defined]
        raise OSError("it is cut short")


def decode_mask(content: bytes | bytearray, orientation: int = 1) -> np.ndarray:
    """(height, width, 1) uint8 or uint16, upright: indices of classes; of a palette image its indices, not
    its colours.

    Raises:
        OSError: it is no image or is cut short.
        ValueError: it holds something else than one index per pixel.
    """
    wanted = (
        "store class indices as a PNG or TIFF of one channel with 8 or 16 bits, or with a palette"
    )
    if content.startswith(TIFF_STARTS):
        from tifffile import imread

        image = imread(BytesIO(content), maxworkers=1).squeeze()
        kind = f"shape {image.shape} of {image.dtype}"
    else:
        with Image.open(BytesIO(content), formats=FORMATS) as stored:
            kind = f"{stored.format} of mode {stored.mode}"
            if stored.format == "JPEG":
                raise ValueError(f"is a JPEG, which changes indices; {wanted}")
            if stored.format == "PNG" and stored.mode == "L" and content[PNG_BITS] < 8:
                raise ValueError(f"has {content[PNG_BITS]} bits of grey per pixel; {wanted}")
            if stored.mode not in ("P", "L", "1", "I", "I;16", "I;16B"):
                raise ValueError(f"is a {kind}; {wanted}")
            image = np.array(stored if orientation == 1 else ImageOps.exif_transpose(stored))
    if image.dtype == bool:
        image = image.astype(np.uint8)
    elif image.dtype == np.int32:  # how older versions of Pillow return 16 bits
        image = image.astype(np.uint16)
    if image.ndim != 2 or image.dtype.newbyteorder("=") not in (np.uint8, np.uint16):
        raise ValueError(f"is a {kind}; {wanted}")
    return np.ascontiguousarray(image, image.dtype.newbyteorder("="))[..., None]


def reason_of(error: Exception, path: str) -> str:
    """Reason why reading a file failed, without its path.

    Raises:
        OSError, MemoryError: the error itself, if the machine is to blame and not the file.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).replace(path, "").strip() or type(error).__name__
