"""Reading image files, from their header or whole, without DALI."""

import errno
import os
import struct
import zlib
from contextlib import suppress
from typing import BinaryIO, NamedTuple

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image, ImageOps, UnidentifiedImageError

ORIENTATION = 0x0112  # the EXIF tag
JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
JPEG_HEADER_BYTES = 1 << 14  # enough for most
JPEG_FRAMES, JPEG_SCAN = (0xFFC0, 0xFFC1, 0xFFC2), 0xFFDA
# Segments without an orientation: tables, restart interval, comment and all APP segments but APP1.
JPEG_TABLES = {0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE, *range(0xFFE0, 0xFFF0)} - {0xFFE1}
PNG_START, CHECKSUM_BYTES = b"\x89PNG\r\n\x1a\n", 4
PNG_HEIGHT, PNG_HEADER, PNG_HEADER_CHECKSUM = slice(20, 24), slice(12, 29), slice(29, 33)
# Bit depth, colour type, compression, filter, and not interlaced.
PNG_PIXELS, PNG_PLAIN_RGB = slice(24, 29), b"\x08\x02\0\0\0"

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


class Header(NamedTuple):
    """What a file's header says of its image."""

    height: int
    """Pixels, upright."""
    width: int
    """Pixels, upright."""
    channels: int
    bits: int
    """Per channel: 8 or 16."""
    orientation: int = 1
    """How the stored image is to be turned upright, as EXIF numbers it; 1: not at all."""
    raw_offset: int = -1
    """First byte of the pixels if they are uncompressed, interleaved and in one piece, else -1."""
    dali_reads: bool = True
    """Whether DALI's decoder returns these channels and bits correctly."""
    ends: bool = True
    """False for a JPEG without the marker at its end: it may be cut short, which a decoder that only
    needs the upper lines would not notice."""


def read_photo_header(path: str) -> Header:
    """Header of a file that shall become 8-bit RGB, whatever it holds.

    Raises:
        OSError: the file cannot be read or is no image.
    """
    with open(path, "rb", buffering=0) as file:
        start = file.read(JPEG_HEADER_BYTES)
        is_jpeg = start.startswith(JPEG_START)
        size, orientation = (_plain_jpeg_size(start) if is_jpeg else None), 1
        if size is None:
            size, orientation = _size_and_orientation(path)
        file.seek(-len(JPEG_END), os.SEEK_END)
        ends = not is_jpeg or file.read() == JPEG_END
    height, width = size if orientation < 5 else reversed(size)
    return Header(height, width, 3, 8, orientation, ends=ends)


def _plain_jpeg_size(start: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG, several times as fast as Pillow finds them.

    None if the header may hold an orientation, is damaged or too long: Pillow is to read it.
    """
    size = None
    at = len(JPEG_START) - 1
    while len(start) >= at + 10:
        marker, length = struct.unpack_from(">HH", start, at)
        if marker == JPEG_SCAN:
            return size
        if marker in JPEG_FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", start, at + 4)
            if bits != 8 or channels not in (1, 3, 4) or not height or not width:
                return None
            size = height, width
        elif marker not in JPEG_TABLES:
            return None
        at += 2 + length
    return None


def _size_and_orientation(path: str) -> tuple[tuple[int, int], int]:
    """Height and width as stored, of an image in any format, and its orientation."""
    with open(path, "rb") as file, Image.open(file) as image:
        # The base class's method: that of PNG decodes the image to find tags behind the pixels.
        tags = Image.Image.getexif(image)
        if image.format == "PNG" and ORIENTATION not in tags:
            tags.load(_png_exif(file))
        return (image.height, image.width), tags.get(ORIENTATION, 1)


def _png_exif(file: BinaryIO) -> bytes:
    """The EXIF tags of a PNG, wherever they stand; empty if there are none."""
    file.seek(len(PNG_START))
    while len(start := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", start)
        if name == b"eXIf":
            return file.read(length)
        file.seek(length + CHECKSUM_BYTES, os.SEEK_CUR)
    return b""


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
    if orientation == 1 and content.startswith(JPEG_START):
        try:
            return simplejpeg.decode_jpeg(content)
        except ValueError:
            pass  # CMYK, which Pillow converts, or a damaged file, which it explains
    is_plain_png = content.startswith(PNG_START) and content[PNG_PIXELS] == PNG_PLAIN_RGB
    if orientation == 1 and is_plain_png:
        with suppress(SpngError):  # it is damaged, which Pillow explains
            return spng_decode(content if num_lines is None else _upper_png(content, num_lines))
    with Image.open(path) as stored:
        # Either of the two would copy the image also where there is nothing to do.
        image = stored if orientation == 1 else ImageOps.exif_transpose(stored)
        if stored.mode.startswith(
            "I;16"
        ):  # convert() would clip the 16 bits instead of scaling them
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _upper_png(content: bytes, num_lines: int) -> bytes:
    """The same with a header that tells `num_lines` only: libspng stops there.

    Since it would not see damage in what is then left of the last chunk, all checksums are compared
    here. The content itself if there is nothing to leave out, or if it is damaged.
    """
    if num_lines >= int.from_bytes(content[PNG_HEIGHT]):
        return content
    at, view = len(PNG_START), memoryview(content)
    while at < len(content):
        end = at + 8 + int.from_bytes(view[at : at + 4])
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + CHECKSUM_BYTES]):
            return content
        at = end + CHECKSUM_BYTES
    upper = bytearray(content)
    upper[PNG_HEIGHT] = num_lines.to_bytes(4)
    upper[PNG_HEADER_CHECKSUM] = zlib.crc32(upper[PNG_HEADER]).to_bytes(4)
    return bytes(upper)


def read_tiff_header(path: str) -> Header:
    """Header of a TIFF whose channels shall be kept as they are.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no TIFF, or holds something else than one image of 8 or 16 bits.
    """
    from tifffile import TiffFile

    with TiffFile(path) as tiff:
        page = tiff.pages.first
        if len(tiff.pages) != 1:
            raise ValueError(f"has {len(tiff.pages)} pages; split it into files of one page")
        if page.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"has pixels of type {page.dtype}; convert them to uint8 or uint16")
        planar = page.planarconfig == 2 and page.samplesperpixel > 1
        raw = (
            page.is_contiguous and not planar and (page.dtype == np.uint8 or tiff.byteorder == "<")
        )
        return Header(
            height=page.imagelength,
            width=page.imagewidth,
            channels=page.samplesperpixel,
            bits=8 * page.dtype.itemsize,
            raw_offset=page.dataoffsets[0] if raw else -1,
            dali_reads=not planar,
        )


def decode_tiff(path: str, header: np.void) -> np.ndarray:
    """(height, width, channels) uint8 or uint16, as stored."""
    dtype = np.uint16 if header["bits"] == 16 else np.uint8
    shape = (int(header["height"]), int(header["width"]), int(header["channels"]))
    if header["raw_offset"] >= 0:
        pixels = np.fromfile(
            path, dtype, shape[0] * shape[1] * shape[2], offset=header["raw_offset"]
        )
        if len(pixels) < shape[0] * shape[1] * shape[2]:
            raise OSError(f"{path} is cut short")
        return pixels.reshape(shape)
    from tifffile import imread

    image = imread(path, maxworkers=1)  # other threads read other files
    if image.shape != shape[: image.ndim]:
        image = np.moveaxis(image, 0, -1)
    return np.ascontiguousarray(image.reshape(shape), dtype)


def decode(path: str, header: np.void, as_stored: bool, num_lines: int | None = None) -> np.ndarray:
    """(height, width, channels) as `header` says: all channels as stored, or 8-bit RGB.

    With `num_lines`, lines below so many may be missing. A damaged file makes decoders raise errors of
    any type; `reason_of` puts them into words.
    """
    image = (
        decode_tiff(path, header)
        if as_stored
        else decode_photo(path, int(header["orientation"]), num_lines)
    )
    height, width = header["height"], header["width"]
    if image.shape[0] not in (height, num_lines) or image.shape[1] != width:
        raise OSError(
            f"{image.shape[0]}x{image.shape[1]} pixels but {height}x{width} when it was indexed"
        )
    return image


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
