"""Decoding of image files without DALI, by a table of their kinds, and resizing of the pixels.

Of a photo, only what a rectangle needs is decoded. A JPEG that is much larger than needed is
decoded at 1/2, 1/4 or 1/8 of its size: libjpeg computes fewer pixels of each block of 8x8, each
about the mean of a square of the whole image. A PNG is decoded down to the rectangle's last line.
"""

import errno
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from typing import BinaryIO

import numpy as np
import simplejpeg
import torch
from imagecodecs import SpngError, spng_decode
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.nn.functional import interpolate

from loaders.images.headers import FORMATS, JPEG_START, PNG_START, Header, read_photo_header
from loaders.images.tiff import decode_tiff, read_tiff_header

FACTORS = (8, 4, 2)  # decoding at 5/8 to 7/8 takes longer than at full size
MARGIN = 1.25
"""18 photographs of 1 to 18 megapixels at 224x224 differ from whole decoding by 0.45 of 255 (mean)
and 17 (maximum); margin 1: 0.91 and 57; margin 2: 0.33 and 17; DALI's resizing: 0.09 and 13."""
# Places in a PNG: its header with the checksum, and in it the height and the kind of pixels.
PNG_HEADER, PNG_CHECKSUM = slice(12, 29), slice(29, 33)
PNG_HEIGHT, PNG_PIXELS = slice(20, 24), slice(24, 29)
PLAIN_RGB = b"\x08\x02\0\0\0"  # 8 bits, RGB, compression, filter, not interlaced
FLIPPED = ((3, 4, 7, 8), (2, 3, 6, 7))
"""EXIF orientations that need the lines, and those that need the columns, flipped to be upright;
from 5 on, both are exchanged before."""

Rectangle = tuple[int, int, int, int]
"""y, x, height and width in pixels."""

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


def _decode_photo(content: bytes | bytearray, header: np.void) -> np.ndarray:
    """Decode a photo upright, (height, width, channels) uint8.

    Raises:
        OSError: it is not an image or is truncated.
    """
    return _as_indexed(_decode_rgb(content, int(header["orientation"])), header)


def _as_indexed(image: np.ndarray, header: np.void) -> np.ndarray:
    """Convert an RGB image to grey if the header has one channel."""
    if header["channels"] == 1:  # the model takes grey images
        return np.array(Image.fromarray(image).convert("L"))[..., None]
    return image


def _decode_rgb(content: bytes | bytearray, orientation: int) -> np.ndarray:
    """Decode a photo upright, (H, W, 3) uint8; grey, palette, CMYK and alpha become RGB."""
    # Pillow reads some files that libjpeg and libspng refuse, and says what is damaged.
    if content.startswith(JPEG_START):
        with suppress(ValueError):
            return _upright(simplejpeg.decode_jpeg(content), orientation)
    if orientation == 1 and _is_plain_rgb_png(content):
        with suppress(SpngError):
            return spng_decode(content)
    with Image.open(BytesIO(content), formats=FORMATS) as stored:
        # Either of the two would copy the image also where there is nothing to do.
        image = stored if orientation == 1 else ImageOps.exif_transpose(stored)
        if stored.mode.startswith("I;16"):  # convert() would clip 16 bits instead of scaling them
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _is_plain_rgb_png(content: bytes | bytearray) -> bool:
    """Return True for a PNG of 8-bit RGB whose lines are stored in order."""
    return content.startswith(PNG_START) and content[PNG_PIXELS] == PLAIN_RGB


def _upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Turn a stored image, (height, width, C), upright by its EXIF orientation."""
    if orientation == 1:
        return stored
    image = stored.swapaxes(0, 1) if orientation >= 5 else stored
    flipped = tuple(axis for axis in (0, 1) if orientation in FLIPPED[axis])
    return np.ascontiguousarray(np.flip(image, flipped))


def _decode_indices(content: bytes | bytearray, header: np.void) -> np.ndarray:
    """Decode a mask, (height, width, 1) uint8 or uint16, upright."""
    masks = import_module("loaders.images.masks")  # photos need none of it
    return _upright(masks.decode_mask(content), int(header["orientation"]))


# `ImageSpec.content` -> the functions that read the header and decode the bytes of such a file
KINDS: dict[str, tuple[Callable[..., Header], Callable[..., np.ndarray]]] = {
    "rgb": (read_photo_header, _decode_photo),
    "stored": (read_tiff_header, decode_tiff),
    "indices": (read_photo_header, _decode_indices),
}


def read_header(file: str | BinaryIO, content: str) -> Header:
    """Read the header of an image, without what needs the pixels of a mask.

    Args:
        file: path, or an open TIFF.
        content: `rgb`, `stored` or `indices`, see `loaders.targets.ImageSpec`.

    Raises:
        OSError: the file cannot be read or is not an image.
        ValueError: content is `stored`, and it is not a TIFF with a single image of 8 or 16 bits.
    """
    read, _ = KINDS[content]
    return read(file)


def decode(content: bytes | bytearray, header: np.void, kind: str) -> np.ndarray:
    """Decode an image to pixels, (height, width, channels) as its header says, upright.

    A damaged file makes decoders raise errors of any type; `reason_of` puts them into words.

    Args:
        content: content of the file.
        header: header of the image, of dtype `HEADER`; a photo becomes grey if it has one channel.
        kind: `rgb`, `stored` or `indices`, see `loaders.targets.ImageSpec.content`.
    """
    if not content:
        raise OSError("empty file")
    _, decode_kind = KINDS[kind]
    image = decode_kind(content, header)
    height, width = int(header["height"]), int(header["width"])
    if image.shape[:2] != (height, width):
        raise OSError(
            f"{image.shape[0]}x{image.shape[1]} pixels but {height}x{width} when it was indexed"
        )
    return image


def decode_resized(
    content: bytes | bytearray,
    header: np.void,
    kind: str,
    rectangle: Rectangle,
    size: tuple[int, int],
    interpolation: str,
    reduces: bool,
) -> np.ndarray:
    """Decode and resize a rectangle of an image, (*size, channels); see `decode` and `resize`.

    Args:
        rectangle: in pixels of the upright image.
        reduces: decode a JPEG at a fraction of its size where that is enough.
    """
    if kind == "rgb":
        part = _from_reduced_jpeg(content, header, rectangle, size) if reduces else None
        if part is None:
            part = _from_upper_png_lines(content, header, rectangle, size)
        if part is not None:
            return part
    y, x, height, width = rectangle
    image = decode(content, header, kind)
    return resize(image[y : y + height, x : x + width], size, interpolation)


def _from_reduced_jpeg(
    content: bytes | bytearray, header: np.void, rectangle: Rectangle, size: tuple[int, int]
) -> np.ndarray | None:
    """Decode a JPEG at the smallest size at which the rectangle is still MARGIN times as large as
    `size` in both directions, and resize the rectangle; None: that is its own size, or libjpeg
    cannot."""
    most = min(rectangle[2] / size[0], rectangle[3] / size[1]) / MARGIN
    factor = next((factor for factor in FACTORS if factor <= most), 1)
    if factor == 1 or not content.startswith(JPEG_START):
        return None
    orientation = int(header["orientation"])
    whole = np.array([header["height"], header["width"]], int)
    stored_width = int(whole[1 if orientation < 5 else 0])
    try:
        image = simplejpeg.decode_jpeg(content, min_width=-(-stored_width // factor))
    except ValueError:  # Pillow may read it, or says what is damaged
        return None
    image = _as_indexed(_upright(image, orientation), header)
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


def _from_upper_png_lines(
    content: bytes | bytearray, header: np.void, rectangle: Rectangle, size: tuple[int, int]
) -> np.ndarray | None:
    """Decode the lines of a plain PNG down to the rectangle's last one, by a header with their
    number, where libspng stops, and resize the rectangle.

    With these alone `loader=pytorch` is 1.4 times as fast on 1280x720 PNG pairs cropped to 256
    (`benchmarks alternatives cases=deblur`: 36 instead of 26 pairs/s on two cores). All checksums
    are compared: libspng would not see later damage.

    Returns:
        None if it is no such PNG, all lines are needed or it is damaged.
    """
    y, x, height, width = rectangle
    num_lines = y + height
    is_plain = header["orientation"] == 1 and _is_plain_rgb_png(content)
    if not is_plain or num_lines >= int.from_bytes(content[PNG_HEIGHT]):
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
    with suppress(SpngError):
        image = spng_decode(upper)
        if image.shape[:2] == (num_lines, header["width"]):
            return resize(_as_indexed(image, header)[y:, x : x + width], size)
    return None


def resize(image: np.ndarray, size: tuple[int, int], interpolation: str = "linear") -> np.ndarray:
    """Resize an image: bilinear with antialiasing, or the nearest pixels.

    Args:
        image: (H, W, C) uint8 or uint16.
        size: (height, width) in pixels.
        interpolation: `linear` or `nearest`.

    Returns:
        (height, width, C) of the image's dtype; the image itself if it has the size.
    """
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
    # Lines cost torch more than columns: the fewer of them it resizes, the better.
    if size[0] < image.shape[0]:
        pixels = interpolate(pixels, (size[0], image.shape[1]), mode="bilinear", antialias=True)
    pixels = interpolate(pixels, size, mode="bilinear", antialias=True)
    if image.dtype == np.uint16:
        pixels = pixels.round().to(torch.uint16)
    return pixels.numpy()[0].transpose(1, 2, 0)


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
    return " ".join(str(error).replace(path, "").split()) or type(error).__name__
