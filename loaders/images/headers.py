"""The headers of image files: what is known of an image before its pixels are decoded."""

import errno
import os
import struct
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base as Tag

from conf.schema import DataConfig

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats that Pillow may read, whatever a file's name; for EPS it would start Ghostscript."""
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_BITS = 24  # the place of a PNG's bits per channel

Content = bytes | bytearray

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


class Header(NamedTuple):
    """Facts about an image, from the header of its file."""

    height: int  # pixels, upright
    width: int
    channels: int
    bits: int  # per channel: 8 or 16; of masks with indices below 0: 32
    orientation: int = 1  # EXIF, of the stored image; 1: it is upright, or not to be turned
    background: int = -1  # colour 0xRRGGBB behind transparent pixels; -1: there are none
    # First byte of the pixels if they are uncompressed, interleaved and in one piece, else -1.
    raw_offset: int = -1
    # `fn.decoders.image` of DALI 2.4 gave Pillow's pixels, within 1, of such files on a CPU.
    dali: bool = False
    highest: int = -1  # masks: the highest index but for `data.ignore_index`
    num_bytes: int = -1  # size of the file
    modified_ns: int = -1  # when it was changed last, since 1970


HEADER = np.dtype([(name, kind) for name, kind in Header.__annotations__.items()])


def header_of(
    height: int, width: int, channels: int, bits: int, orientation: Any, data: DataConfig
) -> Header:
    """Return the header of an image that is stored with this height and width; raise ValueError if
    it has more than `data.max_pixels`. An `orientation` that EXIF does not know is none."""
    if height * width > data.max_pixels:
        raise ValueError(
            f"{height}x{width} pixels are more than data.max_pixels={data.max_pixels}; raise it if "
            "the file is meant"
        )
    if data.exif is False or orientation not in range(1, 9):
        orientation = 1
    if orientation >= 5:
        height, width = width, height
    return Header(height, width, channels, bits, orientation)


def check_pages(num_pages: int) -> None:
    """Raise ValueError if a file has several images, of which only one would be read."""
    if num_pages != 1:
        raise ValueError(f"has {num_pages} pages, not 1; split it into files of one page")


def orientation_of(image: Image.Image, file: BinaryIO) -> Any:
    """Return the EXIF orientation of an image that Pillow has opened from a file."""
    # The base class's method: that of PNG decodes the image to find tags behind the pixels.
    tags = Image.Image.getexif(image)
    if image.format == "PNG" and Tag.Orientation not in tags:
        tags.load(_png_tags(file))
    return tags.get(Tag.Orientation, 1)


def _png_tags(file: BinaryIO) -> bytes:
    """Return the EXIF tags of a PNG, which may lie behind its pixels."""
    file.seek(len(PNG_START))
    while len(start := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", start)
        if name == b"eXIf":
            return file.read(length)
        file.seek(length + 4, os.SEEK_CUR)  # to behind the checksum
    return b""


def reason_of(error: Exception, path: str) -> str:
    """Return the reason why reading a file failed, without its path.

    Raises:
        OSError, MemoryError: the error itself, if the machine is to blame and not the file.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise error
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or a TIFF that data=cells reads"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).replace(path, "").split()) or type(error).__name__
