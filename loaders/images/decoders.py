"""Decoding the bytes of image files without DALI: photos, and other kinds of files by a table."""

import errno
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import BinaryIO

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image, ImageOps, UnidentifiedImageError

from loaders.images.headers import FORMATS, JPEG_START, PNG_START, Header, read_photo_header
from loaders.images.masks import decode_indices
from loaders.images.resizing import FLIPPED, factor_for, reduced_box, reduced_shape, resize
from loaders.images.tiff import decode_tiff, read_tiff_header

# Places in a PNG: its header with the checksum, and in it the height and the kind of pixels.
PNG_HEADER, PNG_CHECKSUM = slice(12, 29), slice(29, 33)
PNG_HEIGHT, PNG_PIXELS = slice(20, 24), slice(24, 29)
PLAIN_RGB = b"\x08\x02\0\0\0"  # 8 bits, RGB, compression, filter, not interlaced

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


def decode_photo(
    content: bytes | bytearray, header: np.void, num_lines: int | None, factor: int
) -> np.ndarray:
    """Decode a photo, (height, width, 3) uint8, upright; with 1 channel if the header says so. See
    `decode` for the arguments.

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
    """Decode a photo, (height, width, 3) uint8, upright; grey, palette, CMYK and alpha become RGB."""
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
    """Return True for a PNG of 8-bit RGB whose lines are stored in order."""
    return content.startswith(PNG_START) and content[PNG_PIXELS] == PLAIN_RGB


def upper_png_lines(content: bytes | bytearray, num_lines: int) -> bytes | bytearray:
    """Return the PNG with a height of `num_lines` in its header, where libspng stops.

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
    """Turn a stored image, (height, width, C), upright by its EXIF orientation."""
    if orientation == 1:
        return stored
    image = stored.swapaxes(0, 1) if orientation >= 5 else stored
    flipped = tuple(axis for axis in (0, 1) if orientation in FLIPPED[axis])
    return np.ascontiguousarray(np.flip(image, flipped))


# `ImageSpec.content` -> the function that reads the header of such a file, and the one that decodes its bytes
KINDS: dict[str, tuple[Callable[..., Header], Callable[..., np.ndarray]]] = {
    "rgb": (read_photo_header, decode_photo),
    "stored": (read_tiff_header, decode_tiff),
    "indices": (read_photo_header, decode_indices),
}


def read_header(file: str | BinaryIO, content: str) -> Header:
    """Read the header of an image; `read_mask` adds what needs the pixels of a mask.

    Args:
        file: path, or an open TIFF.
        content: `rgb`, `stored` or `indices`, see `loaders.targets.ImageSpec`.

    Raises:
        OSError: the file cannot be read or is no image.
        ValueError: channels are to be kept as stored, and it is no TIFF of one image of 8 or 16 bits.
    """
    read, _ = KINDS[content]
    return read(file)


def decode(
    content: bytes | bytearray,
    header: np.void,
    kind: str,
    num_lines: int | None = None,
    factor: int = 1,
) -> np.ndarray:
    """Decode an image to pixels, (height, width, channels) as its header says, upright.

    A damaged file makes decoders raise errors of any type; `reason_of` puts them into words.

    Args:
        content: content of the file.
        header: header of the image, of dtype `HEADER`; a photo becomes grey if it has one channel.
        kind: `rgb`, `stored` or `indices`, see `loaders.targets.ImageSpec.content`.
        num_lines: number of upper lines that are needed; the others may be missing.
        factor: 2, 4 or 8 where a JPEG may have the shape `reduced_shape()` instead.
    """
    if not content:
        raise OSError("empty file")
    whole = (int(header["height"]), int(header["width"]))
    upper = (min(num_lines or whole[0], whole[0]), whole[1])
    _, decode_kind = KINDS[kind]
    image = decode_kind(content, header, num_lines, factor)
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
    """Decode and resize a rectangle of an image, (height, width, channels); see `decode` for the
    errors.

    Args:
        content, header, kind: see `decode`.
        rectangle: y, x, height and width in pixels of the upright image.
        size: (height, width) in pixels of the result.
        interpolation: `linear` or `nearest`.
        reduces: decode a JPEG at a fraction of its size where that is enough.
    """
    y, x, height, width = rectangle
    factor = factor_for((height, width), size) if reduces and kind == "rgb" else 1
    image = decode(content, header, kind, y + height, factor)
    whole = int(header["height"]), int(header["width"])
    if image.shape[1] < whole[1]:  # a JPEG that was reduced
        box = reduced_box(image.shape, whole, factor, header["orientation"], rectangle)
        return resize(image, size, box=box)
    return resize(image[y : y + height, x : x + width], size, interpolation)


def reason_of(error: Exception, path: str) -> str:
    """Return the reason why reading a file failed, without its path.

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
