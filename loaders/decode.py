"""Decoding the bytes of image files without DALI."""

import errno
import math
from contextlib import suppress
from io import BytesIO

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image, ImageOps, UnidentifiedImageError

from loaders import jpeg, png
from loaders.reduced import FLIPPED, reduced_shape

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


def decode(
    content: bytes | bytearray,
    header: np.void,
    kind: str,
    num_lines: int | None = None,
    factor: int = 1,
    is_sound: bool = False,
) -> tuple[np.ndarray, bool]:
    """(height, width, channels) as `header` says, of what `Side.content` names; photos are grey if it says 1.
    And whether it is a JPEG in which libjpeg finds no damage.

    With `num_lines`, lines below so many may be missing; with a `factor` of 2, 4 or 8, a JPEG may have the
    shape `reduced_shape()` instead. A damaged file makes decoders raise errors of any type; `reason_of`
    puts them into words.

    Args:
        content: of the file.
        header: what its header says, of dtype `headers.HEADER`.
        kind: `Side.content`.
        is_sound: the second answer for the same file, when it was decoded before.
    """
    if not content:
        raise OSError("empty file")
    whole = (int(header["height"]), int(header["width"]))
    upper = (min(num_lines or whole[0], whole[0]), whole[1])
    photo = None
    if kind == "stored":
        image = decode_tiff(content, header)
    elif kind == "indices":
        image = decode_mask(content, int(header["orientation"]))
    else:
        if content.startswith(jpeg.START):
            photo = _decode_jpeg(content, header, upper[0], factor, is_sound)
        # What libjpeg refuses, such as CMYK, Pillow converts, and a damaged file it explains.
        image = (
            decode_photo(content, int(header["orientation"]), num_lines) if photo is None else photo
        )
        if header["channels"] == 1:  # what a model of grey images asks for
            image = np.array(Image.fromarray(image).convert("L"))[..., None]
    if image.shape[:2] not in {
        reduced_shape(shape, f) for shape in (whole, upper) for f in (1, factor)
    }:
        raise OSError(
            f"{image.shape[0]}x{image.shape[1]} pixels but {whole[0]}x{whole[1]} when it was indexed"
        )
    return image, photo is not None


def _decode_jpeg(
    content: bytes | bytearray, header: np.void, num_lines: int, factor: int, is_sound: bool
) -> np.ndarray | None:
    """(height, width, 3) uint8, upright, reduced by the factor; None: libjpeg refuses it or finds damage."""
    orientation = int(header["orientation"])
    width = int(header["width" if orientation < 5 else "height"])  # as stored
    least = -(-width // factor) if factor > 1 else 0
    if is_sound and orientation == 1:
        upper = jpeg.upper_lines(content, num_lines, factor)
        if upper is not None:
            image = simplejpeg.decode_jpeg(upper, min_width=least, strict=False)
            return image[: -(-num_lines // factor)]
    with suppress(ValueError):
        return _upright(simplejpeg.decode_jpeg(content, min_width=least), orientation)
    return None


def decode_photo(
    content: bytes | bytearray, orientation: int = 1, num_lines: int | None = None
) -> np.ndarray:
    """(height, width, 3) uint8, upright; grey, palette, CMYK and alpha become RGB.

    Args:
        content: of the file.
        orientation: how its image is to be turned upright, as EXIF numbers it.
        num_lines: all below so many lines may be left out.

    Raises:
        OSError: it is no image or is cut short.
    """
    if orientation == 1 and png.is_plain_rgb(content):
        with suppress(SpngError):  # Pillow explains the damage
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
    if orientation == 1:
        return stored
    image = stored.swapaxes(0, 1) if orientation >= 5 else stored
    flipped = tuple(axis for axis in (0, 1) if orientation in FLIPPED[axis])
    return np.ascontiguousarray(np.flip(image, flipped))


def what_libjpeg_says(content: bytes | bytearray) -> str | None:
    """Its warning of a JPEG, which may be decodable; None: it has none, or the content is no JPEG."""
    if content.startswith(jpeg.START):
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
