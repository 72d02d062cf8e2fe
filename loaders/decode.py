"""Reading image files, from their header or whole, without DALI."""

import errno
import os
import struct
import threading
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

ORIENTATION = 0x0112  # the EXIF tag
JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
JPEG_HEADER_BYTES = 1 << 14  # enough for most
JPEG_FRAMES, JPEG_SCAN = (0xFFC0, 0xFFC1, 0xFFC2), 0xFFDA
# Segments without an orientation: tables, restart interval, comment and all APP segments but APP1.
JPEG_TABLES = {0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE, *range(0xFFE0, 0xFFF0)} - {0xFFE1}
PNG_START, CHECKSUM_BYTES = b"\x89PNG\r\n\x1a\n", 4
PNG_PIXELS, PNG_8_BIT_RGB = slice(24, 26), b"\x08\x02"  # bit depth and colour type

_of_thread = threading.local()

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


def decode_photo(path: str, orientation: int = 1) -> np.ndarray:
    """(height, width, 3) uint8, upright; grey, palette, CMYK and alpha become RGB.

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
    is_plain_png = content.startswith(PNG_START) and content[PNG_PIXELS] == PNG_8_BIT_RGB
    if orientation == 1 and is_plain_png and (decode_png := _png_decoder()):
        decoded = decode_png(content)
        if decoded is not None:  # else it is damaged, which Pillow explains
            return decoded
    with Image.open(path) as stored:
        # Either of the two would copy the image also where there is nothing to do.
        image = stored if orientation == 1 else ImageOps.exif_transpose(stored)
        if stored.mode.startswith(
            "I;16"
        ):  # convert() would clip the 16 bits instead of scaling them
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _png_decoder() -> Callable[[bytes], np.ndarray | None] | None:
    """This thread's decoder of PNGs by nvImageCodec, which DALI brings along: 1.5x as fast as Pillow.

    It returns (height, width, 3) uint8, or None for a damaged file. None without nvImageCodec.
    """
    if not hasattr(_of_thread, "png_decoder"):
        _of_thread.png_decoder = _new_png_decoder()
    return _of_thread.png_decoder


def _new_png_decoder() -> Callable[[bytes], np.ndarray | None] | None:
    try:
        from nvidia.nvimgcodec import (
            CPU_ONLY,
            NVIMGCODEC_DEVICE_CPU_ONLY,
            Backend,
            DecodeParams,
            Decoder,
        )
    except ImportError:  # not installed, or a version before 0.9
        return None
    decoder = Decoder(
        device_id=NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1, backends=[Backend(CPU_ONLY)]
    )
    params = DecodeParams(apply_exif_orientation=False)

    def decode_png(content: bytes) -> np.ndarray | None:
        image = decoder.decode(content, params=params)
        return None if image is None else np.asarray(image)

    return decode_png


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

    image = imread(path)
    if image.shape != shape[: image.ndim]:
        image = np.moveaxis(image, 0, -1)
    return np.ascontiguousarray(image.reshape(shape), dtype)


def decode(path: str, header: np.void, as_stored: bool) -> np.ndarray:
    """(height, width, channels) as `header` says: all channels as stored, or 8-bit RGB.

    A damaged file makes decoders raise errors of any type; `reason_of` puts them into words.
    """
    image = (
        decode_tiff(path, header) if as_stored else decode_photo(path, int(header["orientation"]))
    )
    height, width = header["height"], header["width"]
    if image.shape[:2] != (height, width):
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
