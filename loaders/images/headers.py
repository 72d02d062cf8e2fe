"""The headers of image files: what is known of an image before its pixels are decoded."""

import errno
import os
import stat
import struct
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    PHOTOMETRIC_INTERPRETATION,
    PLANAR_CONFIGURATION,
    SAMPLEFORMAT,
    SAMPLESPERPIXEL,
)

# tifffile is imported where a TIFF is read, since that takes 0.1 s.

JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_BITS, PNG_COLOURS, PALETTE = 24, 25, 3  # places in a PNG, and a kind of colours
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
TIFF_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B")
UNSIGNED, PLANES = 1, 2  # a sample format and a planar configuration of TIFFs
GREY, RGB = 1, 2  # photometric interpretations
NONE, LZW, DEFLATE = 1, 5, (8, 32946)  # compressions
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats that Pillow may read, whatever a file's name; for EPS it would start Ghostscript."""
DALI_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "TIFF")
DALI_COMPRESSIONS = ("raw", "tiff_lzw", "jpeg", "tiff_adobe_deflate", "tiff_deflate")  # of TIFFs

ORIENTATION = 0x0112  # the EXIF tag

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


def read_header(path: str, content: str, background: int = 0xFFFFFF, turns: bool = True) -> Header:
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
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
        raise OSError("it is a folder, pipe, socket or device")
    with open(path, "rb") as file:
        start = file.read(64)
        if not start:
            raise OSError("empty file")
        file.seek(0)
        is_tiff = start.startswith(TIFF_STARTS)
        if content == "stored" or (content == "indices" and is_tiff):
            header = _tiff_header(file, content)
        else:
            header = _pillow_header(file, start, background, turns)
    is_turned = content == "rgb" and is_tiff  # by Pillow, and its size too
    if not turns and header.orientation != 1:
        if is_turned:
            raise ValueError("is a TIFF with an orientation that Pillow follows; save it upright")
        header = header._replace(orientation=1)
    if header.orientation >= 5 and not is_turned:
        header = header._replace(height=header.width, width=header.height)
    return header


def _pillow_header(file: BinaryIO, start: bytes, background: int, turns: bool) -> Header:
    """Read the header of an image that begins with `start`, with its size as stored."""
    with Image.open(file, formats=FORMATS) as image:
        kind = image.format
        if kind == "TIFF":
            _check_tiff(image)
        elif image.mode == "F":
            raise ValueError("has floats as pixels; save it with 8 or 16 bits")
        is_colour = kind == "PNG" and start[PNG_COLOURS] != PALETTE
        # A transparent colour is compared with pixels of 8 bits by Pillow.
        if is_colour and "transparency" in image.info and start[PNG_BITS] != 8:
            raise ValueError(
                f"has a transparent colour of {start[PNG_BITS]} bits; save it with 8 bits"
            )
        # The base class's method: that of PNG decodes the image to find tags behind the pixels.
        tags = Image.Image.getexif(image)
        if kind == "PNG" and ORIENTATION not in tags:
            tags.load(_png_tags(file))
        orientation = _known(tags.get(ORIENTATION, 1))
        return Header(
            *(image.height, image.width, 3, 8, orientation),
            background=background if image.has_transparency_data else -1,
            dali=_dali_reads(image, orientation if turns else 1),
        )


def _dali_reads(image: Any, orientation: int) -> bool:
    """Return `Header.dali` of an image that Pillow has opened."""
    if image.has_transparency_data or image.format not in DALI_FORMATS:
        return False
    if image.format == "TIFF":
        return image.info["compression"] in DALI_COMPRESSIONS
    # It does not look for tags in XMP, nor in a WebP.
    return orientation == 1 or ("exif" in image.info and image.format != "WEBP")


def _known(orientation: Any) -> int:
    """Return 1 in place of an EXIF orientation that decoders do not know."""
    return orientation if orientation in range(1, 9) else 1


def _check_tiff(image: Any) -> None:
    """Raise ValueError for a `TiffImageFile` that Pillow would decode to other pixels."""
    tags = image.tag_v2
    _check_pages(image.n_frames)
    bits, is_inverted = tags.get(BITSPERSAMPLE, (1,))[0], tags[PHOTOMETRIC_INTERPRETATION] == 0
    if (
        image.mode not in TIFF_MODES
        or bits not in (1, 2, 4, 8, 16)
        or tags.get(SAMPLESPERPIXEL, 1) != len(image.getbands())
        or tags.get(SAMPLEFORMAT, (UNSIGNED,))[0] != UNSIGNED
        or (bits == 16 and (is_inverted or tags.get(PLANAR_CONFIGURATION) == PLANES))
        or (image.mode == "YCbCr" and image.info["compression"] != "jpeg")
    ):
        raise ValueError(
            f"is a TIFF of {bits} bits and mode {image.mode}, which does not become 8-bit RGB; "
            "data=cells reads any channels of 8 or 16 bits"
        )


def _check_pages(num_pages: int) -> None:
    if num_pages != 1:
        raise ValueError(f"has {num_pages} pages, not 1; split it into files of one page")


def _png_tags(file: BinaryIO) -> bytes:
    """Return the EXIF tags of a PNG, which may lie behind its pixels."""
    file.seek(len(PNG_START))
    while len(start := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", start)
        if name == b"eXIf":
            return file.read(length)
        file.seek(length + 4, os.SEEK_CUR)  # to behind the checksum
    return b""


def _tiff_header(file: BinaryIO, content: str) -> Header:
    """Read the header of a TIFF whose content is `stored` or `indices`, with its size as stored."""
    from tifffile import TiffFile

    with TiffFile(file) as tiff:
        page = tiff.pages.first
        _check_pages(sum(not page.is_reduced for page in tiff.pages))
        orientation = _known(page.tags.valueof(ORIENTATION, 1))
        size = page.imagelength, page.imagewidth
        if content == "indices":
            return Header(*size, 1, 8, orientation)
        if page.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"has pixels of type {page.dtype}; convert them to uint8 or uint16")
        bits = 8 * page.dtype.itemsize
        is_interleaved = page.planarconfig != PLANES or page.samplesperpixel == 1
        is_plain = is_interleaved and page.fillorder == 1 and page.bitspersample == bits
        is_native = bits == 8 or tiff.byteorder == "<"
        is_raw = is_plain and is_native and page.is_contiguous and page.predictor == 1
        by_dali = is_plain and orientation == 1 and page.photometric in (GREY, RGB)
        by_dali = by_dali and page.compression in (NONE, LZW, *DEFLATE)
        return Header(
            *(*size, page.samplesperpixel, bits),
            raw_offset=page.dataoffsets[0] if is_raw else -1,
            dali=by_dali,
        )


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
