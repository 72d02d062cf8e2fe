"""Decoding image files without DALI."""

import errno
import os
from contextlib import suppress

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image, ImageOps, UnidentifiedImageError

from loaders import png

JPEG_START = b"\xff\xd8\xff"

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


def decode(path: str, header: np.void, as_stored: bool, num_lines: int | None = None) -> np.ndarray:
    """(height, width, channels) as `header` says: all channels as stored, or 8-bit RGB or grey.

    With `num_lines`, lines below so many may be missing. A damaged file makes decoders raise errors of
    any type; `reason_of` puts them into words.
    """
    image = (
        decode_tiff(path, header)
        if as_stored
        else decode_photo(path, int(header["orientation"]), num_lines)
    )
    if not as_stored and header["channels"] == 1:  # what a model of grey images asks for
        image = np.asarray(Image.fromarray(image).convert("L"))[..., None]
    height, width = header["height"], header["width"]
    if image.shape[0] not in (height, num_lines) or image.shape[1] != width:
        raise OSError(
            f"{image.shape[0]}x{image.shape[1]} pixels but {height}x{width} when it was indexed"
        )
    return image


def decode_photo(path: str, orientation: int = 1, num_lines: int | None = None) -> np.ndarray:
    """(height, width, 3) uint8, upright; grey, palette, CMYK and alpha become RGB.

    Args:
        path: of the file.
        orientation: how it is to be turned upright, as EXIF numbers it.
        num_lines: a decoder that can may leave out all below so many lines.

    Raises:
        OSError: the file cannot be read, is no image or is cut short.
    """
    with open(path, "rb") as file:
        content = file.read()
    # What these two refuse, such as CMYK, Pillow converts, and a damaged file it explains.
    if orientation == 1 and content.startswith(JPEG_START):
        with suppress(ValueError):
            return simplejpeg.decode_jpeg(content)
    if orientation == 1 and png.is_plain_rgb(content):
        with suppress(SpngError):
            return spng_decode(
                content if num_lines is None else png.upper_lines(content, num_lines)
            )
    with Image.open(path) as stored:
        # Either of the two would copy the image also where there is nothing to do.
        image = stored if orientation == 1 else ImageOps.exif_transpose(stored)
        if stored.mode.startswith("I;16"):  # convert() would clip 16 bits instead of scaling them
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def decode_tiff(path: str, header: np.void) -> np.ndarray:
    """(height, width, channels) uint8 or uint16, as stored."""
    dtype = np.uint16 if header["bits"] == 16 else np.uint8
    shape = (int(header["height"]), int(header["width"]), int(header["channels"]))
    if header["raw_offset"] >= 0:
        pixels = np.fromfile(path, dtype, int(np.prod(shape)), offset=header["raw_offset"])
        if pixels.size < np.prod(shape):
            raise OSError(f"{path} is cut short")
        return pixels.reshape(shape)
    from tifffile import imread

    image = imread(path, maxworkers=1)  # other threads read other files
    if image.shape != shape[: image.ndim]:
        image = np.moveaxis(image, 0, -1)
    return np.ascontiguousarray(image.reshape(shape), dtype)


def reason_of(error: Exception, path: str) -> str:
    """Why reading a file failed, without its path.

    Raises:
        OSError, MemoryError: the error itself, if the machine is to blame and not the file.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error
    if isinstance(error, UnidentifiedImageError):
        return "not an image" if os.path.getsize(path) else "empty file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).replace(path, "").strip() or type(error).__name__
