"""The kinds of image files by what is read of them: how their headers and their pixels are read."""

import errno
from collections.abc import Callable
from typing import BinaryIO

import numpy as np
from PIL import UnidentifiedImageError

from loaders.images.decoders import decode_photo
from loaders.images.headers import Header, read_photo_header
from loaders.images.masks import decode_indices
from loaders.images.resizing import factor_for, reduced_box, reduced_shape, resize
from loaders.images.tiff import decode_tiff, read_tiff_header

# `ImageSpec.content` -> the function that reads the header of such a file, and the one that decodes its bytes
KINDS: dict[str, tuple[Callable[..., Header], Callable[..., np.ndarray]]] = {
    "rgb": (read_photo_header, decode_photo),
    "stored": (read_tiff_header, decode_tiff),
    "indices": (read_photo_header, decode_indices),
}


def read_header(file: str | BinaryIO, content: str) -> Header:
    """Header of an image; `read_mask` adds what needs the pixels of a mask.

    Args:
        file: path, or a TIFF that is open.
        content: `rgb`, `stored` or `indices`, as in `loaders.targets.ImageSpec`.

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
    """Pixels of an image: (height, width, channels) as its header says, upright.

    A damaged file makes decoders raise errors of any type; `reason_of` puts them into words.

    Args:
        content: of the file.
        header: of the image, of dtype `HEADER`; photos become grey if it has one channel.
        kind: `rgb`, `stored` or `indices`, as `loaders.targets.ImageSpec.content`.
        num_lines: upper lines that are needed; others may be missing.
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
