"""Decoding the bytes of image files without DALI."""

import errno
import math
from contextlib import suppress
from io import BytesIO

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image, ImageOps, UnidentifiedImageError

from loaders import png
from loaders.reduced import FLIPPED, reduced_shape

JPEG_START = b"\xff\xd8\xff"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


def decode(
    content: bytes | bytearray,
    header: np.void,
    kind: str,
    num_lines: int | None = None,
    factor: int = 1,
) -> np.ndarray:
    """(height, width, channels) as `header` says, of what `Side.content` names; photos are grey if it says 1.

    `content` is that of the file, and `kind` is `Side.content`.
    With `num_lines`, lines below so many may be missing; with a `factor` of 2, 4 or 8, a JPEG may have the
    shape `reduced_shape()` instead. A damaged file makes decoders raise errors of any type; `reason_of`
    puts them into words.
    """
    if not content:
        raise OSError("empty file")
    whole = (int(header["height"]), int(header["width"]))
    reduced = reduced_shape(whole, factor)
    if kind == "stored":
        image = decode_tiff(content, header)
    elif kind == "indices":
        image = decode_mask(content, int(header["orientation"]))
    else:
        least = reduced if factor > 1 else (0, 0)
        image = decode_photo(content, int(header["orientation"]), num_lines, least)
        if header["channels"] == 1:  # what a model of grey images asks for
            image = np.asarray(Image.fromarray(image).convert("L"))[..., None]
    if image.shape[:2] not in (whole, reduced, (num_lines, whole[1])):
        raise OSError(
            f"{image.shape[0]}x{image.shape[1]} pixels but {whole[0]}x{whole[1]} when it was indexed"
        )
    return image


def decode_photo(
    content: bytes | bytearray,
    orientation: int = 1,
    num_lines: int | None = None,
    least: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """(height, width, 3) uint8, upright; grey, palette, CMYK and alpha become RGB.

    Args:
        content: of the file.
        orientation: how its image is to be turned upright, as EXIF numbers it.
        num_lines: a decoder that can may leave out all below so many lines.
        least: (height, width); a decoder that can may reduce a JPEG as long as it stays so large; 0: not.

    Raises:
        OSError: it is no image or is cut short.
    """
    # What these two refuse, such as CMYK, Pillow converts, and a damaged file it explains.
    if content.startswith(JPEG_START):
        min_height, min_width = least if orientation < 5 else least[::-1]
        with suppress(ValueError):
            return _upright(
                simplejpeg.decode_jpeg(content, min_height=min_height, min_width=min_width),
                orientation,
            )
    if orientation == 1 and png.is_plain_rgb(content):
        with suppress(SpngError):
            return spng_decode(
                content if num_lines is None else png.upper_lines(content, num_lines)
            )
    with Image.open(BytesIO(content)) as stored:
        # Either of the two would copy the image also where there is nothing to do.
        image = stored if orientation == 1 else ImageOps.exif_transpose(stored)
        if stored.mode.startswith("I;16"):  # convert() would clip 16 bits instead of scaling them
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """(height, width, C) as stored, turned as EXIF numbers it."""
    image = stored.swapaxes(0, 1) if orientation >= 5 else stored
    flipped = tuple(axis for axis in (0, 1) if orientation in FLIPPED[axis])
    return np.ascontiguousarray(np.flip(image, flipped))


def what_libjpeg_says(content: bytes | bytearray) -> str | None:
    """Its warning of a JPEG, which may be decodable; None: it has none, or the content is no JPEG."""
    if content.startswith(JPEG_START):
        try:
            simplejpeg.decode_jpeg(content)
        except ValueError as error:
            return str(error)
    return None


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


def decode_mask(content: bytes | bytearray, orientation: int = 1) -> np.ndarray:
    """(height, width, 1) uint8 or uint16, upright: indices of classes; of a palette image its numbers, not
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
        with Image.open(BytesIO(content)) as stored:
            kind = f"{stored.format} of mode {stored.mode}"
            if stored.format == "JPEG":
                raise ValueError(f"is a JPEG, which changes indices; {wanted}")
            if stored.format == "PNG" and stored.mode == "L" and content[png.BITS] < 8:
                raise ValueError(f"has {content[png.BITS]} bits of grey per pixel; {wanted}")
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
    """Why reading a file failed, without its path.

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
