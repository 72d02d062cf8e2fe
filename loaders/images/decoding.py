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

from conf.errors import counted
from loaders.images.headers import FORMATS, JPEG_START, PNG_BITS, PNG_START, TIFF_STARTS

# tifffile is imported where a TIFF is read, since that takes 0.1 s.

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
LOSSLESS = ("PNG", "BMP", "GIF")  # formats of Pillow that keep indices

Content = bytes | bytearray
Rectangle = tuple[int, int, int, int]
"""y, x, height and width in pixels."""


def decode_resized(
    content: Content,
    header: np.void,
    kind: str,
    rectangle: Rectangle,
    size: tuple[int, int],
    interpolation: str,
    reduces: bool,
) -> np.ndarray:
    """Decode and resize a rectangle of the upright image, (*size, channels); see `decode` and
    `resize`.

    If it `reduces`, it decodes a JPEG at the smallest size at which the rectangle is still MARGIN
    times as large as `size` in both directions.
    """
    y, x, height, width = rectangle
    most = min(height / size[0], width / size[1]) / MARGIN
    factor = next((factor for factor in FACTORS if factor <= most and reduces), 1)
    image = decode(content, header, kind, y + height, factor)
    if image.shape[1] != header["width"]:
        return _resize_reduced(image, header, factor, rectangle, size)
    return resize(image[y : y + height, x : x + width], size, interpolation)


def decode(
    content: Content, header: np.void, kind: str, num_lines: int | None = None, factor: int = 1
) -> np.ndarray:
    """Decode the content of a file to pixels, (height, width, channels) as its `HEADER` says,
    upright; `kind` is that of `ImageSpec.content`.

    If `num_lines` at the top are enough, others may be missing in the result; if 1 / factor of the
    size is, a JPEG has that. A damaged file makes decoders raise errors of any type; `reason_of`
    puts them into words.
    """
    if not content:
        raise OSError("empty file")
    if kind == "stored":
        image = _decode_tiff(content, header)
    elif kind == "indices":
        image = _upright(_decode_mask(content), header)
    else:
        image = _decode_photo(content, header, num_lines, factor)
    height, width = int(header["height"]), int(header["width"])
    reduced = -(-height // factor), -(-width // factor)
    if image.shape[:2] not in ((height, width), (num_lines, width), reduced):
        raise OSError(
            f"{image.shape[0]}x{image.shape[1]} pixels but {height}x{width} when it was indexed"
        )
    return image


def _decode_photo(
    content: Content, header: np.void, num_lines: int | None, factor: int
) -> np.ndarray:
    stored = None
    if content.startswith(JPEG_START):
        stored_width = int(header["width" if header["orientation"] < 5 else "height"])
        stored = _decode_jpeg(content, -(-stored_width // factor) if factor > 1 else 0)
    elif content.startswith(PNG_START):
        stored = _decode_png(content, header, num_lines)
    if stored is None:
        stored = _decode_by_pillow(content, int(header["background"]))
    is_turned = content.startswith(TIFF_STARTS)  # by Pillow
    image = stored if is_turned else _upright(stored, header)
    if header["channels"] == 1:  # the model takes grey images
        return np.array(Image.fromarray(image).convert("L"))[..., None]
    return image


def _decode_jpeg(content: Content, min_width: int) -> np.ndarray | None:
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


def _decode_png(content: Content, header: np.void, num_lines: int | None) -> np.ndarray | None:
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


def _decode_by_pillow(content: Content, background: int) -> np.ndarray:
    """Decode a photo, (height, width, 3); transparent pixels show the background, if there is one.
    A TIFF is turned upright."""
    with Image.open(BytesIO(content), formats=FORMATS) as stored:
        if stored.mode.startswith("I"):  # 16 bits, which convert() would clip, not scale
            grey = (np.asarray(stored) >> 8).astype(np.uint8)
            return np.stack([grey] * 3, axis=2)
        if background < 0:
            return np.array(stored.convert("RGB"))
        photo = stored.convert("RGBA")
        image = Image.new("RGB", photo.size, f"#{background:06x}")
        image.paste(photo, mask=photo)
        return np.array(image)


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


def _decode_tiff(content: Content, header: np.void) -> np.ndarray:
    shape = header[["height", "width", "channels"]].item()
    dtype = np.dtype(f"uint{header['bits']}")
    if (start := int(header["raw_offset"])) >= 0:  # tifffile takes 40 to 80 times as long
        if len(content) < start + math.prod(shape) * dtype.itemsize:
            raise OSError("it is cut short")
        pixels = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
        return np.require(pixels, requirements=["A", "W"])
    image = _read_tiff(content)
    if image.shape != shape[: image.ndim]:
        image = np.moveaxis(image, 0, -1)
    return np.ascontiguousarray(image.reshape(shape), dtype)


def _read_tiff(content: Content) -> np.ndarray:
    from tifffile import imread

    return imread(BytesIO(content), maxworkers=1)  # other threads read other files


def _decode_mask(content: Content) -> np.ndarray:
    """Decode a mask to indices of classes as stored, (height, width, 1): uint8 or uint16, or int32
    if some are below 0. Of an image with a palette it returns the indices, not the colours.

    Raises:
        OSError: it is not an image or is truncated.
        ValueError: it holds something else than one index from 0 to 65535, or below 0, per pixel.
    """
    wanted = "store class indices as a PNG or TIFF of one channel of integers, or with a palette"
    if content.startswith(TIFF_STARTS):
        image = _read_tiff(content).squeeze()
        kind = f"shape {image.shape} of {image.dtype}"
    else:
        with Image.open(BytesIO(content), formats=FORMATS) as stored:
            kind = f"{stored.format} of mode {stored.mode}"
            if stored.format not in LOSSLESS:
                raise ValueError(f"is a {stored.format}, which may change indices; {wanted}")
            if kind == "PNG of mode L" and content[PNG_BITS] < 8:
                raise ValueError(
                    f"has {counted(content[PNG_BITS], 'bit')} of grey per pixel; {wanted}"
                )
            image = np.array(stored)
    if image.ndim != 2 or image.dtype.kind not in "bui":
        raise ValueError(f"is a {kind}; {wanted}")
    if image.dtype in (bool, np.uint8):
        return image.astype(np.uint8)[..., None]
    low, high = int(image.min()), int(image.max())
    if high > 65535 or low < -32768:
        raise ValueError(f"holds {high if high > 65535 else low}; indices are 0 to 65535")
    return image.astype(np.uint16 if low >= 0 else np.int32)[..., None]


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
