"""The headers of image files, and reading those of all formats but TIFF."""

import errno
import os
import stat
import struct
from collections.abc import Mapping
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

JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_BITS, PNG_COLOURS, PALETTE = 24, 25, 3  # places in a PNG, and a kind of colours
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats that Pillow may read, whatever a file's name; for EPS it would start Ghostscript."""
DALI_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "TIFF")
DALI_COMPRESSIONS = ("raw", "tiff_lzw", "jpeg", "tiff_adobe_deflate", "tiff_deflate")  # of TIFFs
TIFF_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B")
UNSIGNED, PLANES = 1, 2  # a sample format and a planar configuration of TIFFs

ORIENTATION = 0x0112  # the EXIF tag
WHITE = 0xFFFFFF


class Header(NamedTuple):
    """Facts about an image, from the header of its file."""

    height: int
    """Pixels, upright."""
    width: int
    """Pixels, upright."""
    channels: int
    bits: int
    """Per channel: 8 or 16; of masks with indices below 0: 32."""
    orientation: int = 1
    """EXIF orientation of the stored image; 1: it is upright, or not to be turned."""
    background: int = -1
    """Colour 0xRRGGBB behind transparent pixels; -1: there are none."""
    raw_offset: int = -1
    """First byte of the pixels if they are uncompressed, interleaved and in one piece, else -1."""
    dali: int = 0
    """What `fn.decoders.image` of DALI 2.4 did with such files on a CPU. 0: it cannot read them, or
    shows what is transparent; 1: it gave other pixels than Pillow; 2: the same within 1."""
    highest: int = -1
    """Masks: the highest index but for `data.ignore_index`."""
    num_bytes: int = -1
    """Size of the file."""
    modified_ns: int = -1
    """When the file was changed last, in ns since 1970."""

    def turned(self, orientation: int) -> "Header":
        """Return the header of the same file, of whose orientation this one is used."""
        size = self.height, self.width
        height, width = size if (orientation < 5) == (self.orientation < 5) else size[::-1]
        return self._replace(height=height, width=width, orientation=orientation)


HEADER = np.dtype([(name, kind) for name, kind in Header.__annotations__.items()])

# The index compares every header with data.max_pixels; Pillow's own limit could not be raised.
Image.MAX_IMAGE_PIXELS = None


def read_start(path: str) -> bytes:
    """Return the first bytes of a file.

    Raises:
        OSError: it cannot be read, is empty, or is none: opening a pipe would wait for ever.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is a folder, pipe, socket or device")
    with open(path, "rb", buffering=0) as file:
        start = file.read(64)
    if not start:
        raise OSError("empty file")
    return start


def read_pillow_header(path: str, start: bytes, background: int) -> Header:
    """Read the header of an image that begins with `start`; see `read_header`."""
    with open(path, "rb") as file, Image.open(file, formats=FORMATS) as image:
        is_transparent = image.has_transparency_data
        if image.mode == "F" and image.format != "TIFF":
            raise ValueError("has floats as pixels; save it with 8 or 16 bits")
        if image.format == "PNG" and is_transparent:
            # Which Pillow compares with pixels of 8 bits.
            has_clear_colour = "transparency" in image.info and start[PNG_COLOURS] != PALETTE
            if has_clear_colour and start[PNG_BITS] != 8:
                raise ValueError(
                    f"has a transparent colour of {start[PNG_BITS]} bits; save it with 8 bits"
                )
        if image.format == "TIFF":
            _check_tiff(image)
        # The base class's method: that of PNG decodes the image to find tags behind the pixels.
        tags = Image.Image.getexif(image)
        if image.format == "PNG" and ORIENTATION not in tags:
            tags.load(_png_tags(file))
        orientation = orientation_in(tags)
        is_known = image.format in DALI_FORMATS and not is_transparent
        if image.format == "WEBP":
            is_known = is_known and orientation == 1
        if image.format == "TIFF":
            is_known = is_known and image.info["compression"] in DALI_COMPRESSIONS
        header = Header(image.height, image.width, 3, 8)
        if is_transparent:
            header = header._replace(background=background)
        if is_known:  # DALI does not look for tags in XMP
            is_alike = orientation == 1 or image.format == "TIFF" or "exif" in image.info
            header = header._replace(dali=2 if is_alike else 1)
        if image.format == "TIFF":  # whose size is that of the upright image
            return header._replace(orientation=orientation)
        return header.turned(orientation)


def orientation_in(tags: Mapping[int, Any]) -> int:
    """Return the EXIF orientation among tags; 1 in place of those that decoders do not know."""
    orientation = tags.get(ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def _check_tiff(image: Any) -> None:
    """Raise ValueError for a `TiffImageFile` that Pillow would decode to other pixels."""
    tags, num_pages = image.tag_v2, image.n_frames
    if num_pages != 1:
        raise ValueError(f"has {num_pages} pages, not 1; split it into files of one page")
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
