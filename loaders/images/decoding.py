"""Decoding of image files without DALI, and resizing of the pixels.

A JPEG that is much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size: libjpeg computes
fewer pixels of each block of 8x8, each about the mean of a square of the whole image. A PNG is
decoded down to the last line that is needed.
"""

import math
import re
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import simplejpeg
import torch
from imagecodecs import SpngError, spng_decode
from PIL import Image
from torch.nn.functional import interpolate

from loaders.images.headers import (
    FORMATS,
    JPEG_START,
    PNG_START,
    WHITE,
    Header,
    read_pillow_header,
    read_start,
)
from loaders.images.masks import decode_mask
from loaders.images.tiff import TIFF_STARTS, decode_tiff, read_tiff_header

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


def read_header(path: str, content: str, background: int = WHITE, turns: bool = True) -> Header:
    """Read the header of an image, without what needs the pixels of a mask.

    Args:
        path: path of the file.
        content: `rgb`, `stored` or `indices`, see `loaders.targets.ImageSpec`.
        background: colour 0xRRGGBB behind transparent pixels.
        turns: turn the image upright by its EXIF orientation.

    Raises:
        OSError: the file cannot be read or is not an image.
        ValueError: its pixels cannot be kept, or become 8-bit RGB (`rgb`), without a change.
    """
    start = read_start(path)
    is_tiff = start.startswith(TIFF_STARTS)
    if content == "stored" or (content == "indices" and is_tiff):
        header = read_tiff_header(path, content)
    else:
        header = read_pillow_header(path, start, background)
    if turns or header.orientation == 1:
        return header
    if content == "rgb" and is_tiff:
        raise ValueError("is a TIFF with an orientation, by which Pillow turns it; save it upright")
    return header.turned(1)


def decode(
    content: bytes | bytearray, header: np.void, kind: str, num_lines: int | None = None
) -> np.ndarray:
    """Decode an image to pixels, (height, width, channels) as its header says, upright.

    A damaged file makes decoders raise errors of any type; `reason_of` puts them into words.

    Args:
        content: content of the file.
        header: header of the image, of dtype `HEADER`; a photo becomes grey if it has one channel.
        kind: `rgb`, `stored` or `indices`, see `loaders.targets.ImageSpec.content`.
        num_lines: lines at the top that are needed; others may be missing in the result.
    """
    if not content:
        raise OSError("empty file")
    if kind == "stored":
        image = decode_tiff(content, header)
    elif kind == "indices":
        image = _upright(decode_mask(content), int(header["orientation"]))
    else:
        image = _decode_photo(content, header, num_lines)
    height, width = int(header["height"]), int(header["width"])
    if image.shape[1] != width or image.shape[0] not in (height, num_lines):
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
    if kind == "rgb" and reduces:
        image = _from_reduced_jpeg(content, header, rectangle, size)
        if image is not None:
            return image
    y, x, height, width = rectangle
    image = decode(content, header, kind, num_lines=y + height)
    return resize(image[y : y + height, x : x + width], size, interpolation)


def _decode_photo(content: bytes | bytearray, header: np.void, num_lines: int | None) -> np.ndarray:
    """Decode a photo upright, (height, width, channels) uint8."""
    stored = None
    if content.startswith(JPEG_START):
        stored = _decode_jpeg(content)
    elif content.startswith(PNG_START):
        stored = _decode_png(content, header, num_lines)
    if stored is None:
        return _as_indexed(_decode_by_pillow(content, header), header)
    return _as_indexed(_upright(stored, int(header["orientation"])), header)


def _decode_jpeg(content: bytes | bytearray, min_width: int = 0) -> np.ndarray | None:
    """Decode a JPEG to RGB as stored, at the smallest of its sizes 1, 1/2, 1/4 and 1/8 that is
    `min_width` pixels wide (0: at 1); None: libjpeg finds it unusual, but Pillow may read it.

    Raises:
        OSError: its data end early. Pillow would fill the rest with one colour.
    """
    try:
        return simplejpeg.decode_jpeg(content, min_width=min_width)
    except ValueError as error:
        # The second one: of restart markers, the next one is missing.
        if re.search("premature end|found marker 0xd9", str(error), re.IGNORECASE):
            raise OSError(f"it is truncated: {error}") from error
        return None


def _decode_png(
    content: bytes | bytearray, header: np.void, num_lines: int | None
) -> np.ndarray | None:
    """Decode an opaque PNG of 8-bit RGB whose lines are stored in order; None: it is another one,
    or is damaged, and Pillow says how.

    If lines at the top are enough, it is decoded by a header with their number, where libspng
    stops. Without it, loader=pytorch has 0.71 times the speed on PNG pairs of 1280x720 cropped to
    256. All checksums are compared: libspng would not see later damage.
    """
    if content[PNG_PIXELS] != PLAIN_RGB or header["background"] >= 0:
        return None
    if num_lines is not None and num_lines < header["height"] and header["orientation"] == 1:
        at, view = len(PNG_START), memoryview(content)
        while at < len(content):
            end = at + 8 + int.from_bytes(view[at : at + 4])
            if zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + 4]):
                return None
            at = end + 4
        content = bytearray(content)
        content[PNG_HEIGHT] = num_lines.to_bytes(4)
        content[PNG_CHECKSUM] = zlib.crc32(content[PNG_HEADER]).to_bytes(4)
    with suppress(SpngError):
        return spng_decode(content)
    return None


def _decode_by_pillow(content: bytes | bytearray, header: np.void) -> np.ndarray:
    """Decode a photo upright, (height, width, 3); transparent pixels show the background."""
    orientation, background = int(header["orientation"]), int(header["background"])
    with Image.open(BytesIO(content), formats=FORMATS) as stored:
        if stored.mode.startswith("I"):  # 16 bits, which convert() would clip, not scale
            pixels = (np.asarray(stored) >> 8).astype(np.uint8)
            image = Image.fromarray(pixels).convert("RGB")
        elif background >= 0:
            photo = stored.convert("RGBA")
            image = Image.new("RGB", photo.size, f"#{background:06x}")
            image.paste(photo, mask=photo)
        else:
            image = stored.convert("RGB")
        is_upright = stored.format == "TIFF"  # turned by Pillow
    return np.array(image) if is_upright else _upright(np.array(image), orientation)


def _upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Turn a stored image, (height, width, C), upright by its EXIF orientation."""
    if orientation == 1:
        return stored
    image = stored.swapaxes(0, 1) if orientation >= 5 else stored
    flipped = tuple(axis for axis in (0, 1) if orientation in FLIPPED[axis])
    return np.ascontiguousarray(np.flip(image, flipped))


def _as_indexed(image: np.ndarray, header: np.void) -> np.ndarray:
    """Convert an RGB image to grey if the header has one channel."""
    if header["channels"] == 1:  # the model takes grey images
        return np.array(Image.fromarray(image).convert("L"))[..., None]
    return image


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
    stored = _decode_jpeg(content, min_width=-(-stored_width // factor))
    if stored is None:
        return None
    image = _as_indexed(_upright(stored, orientation), header)
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
    pixels = interpolate(pixels, size, mode="bilinear", antialias=True)
    if image.dtype == np.uint16:
        pixels = pixels.round().to(torch.uint16)
    return pixels.numpy()[0].transpose(1, 2, 0)
