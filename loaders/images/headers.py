"""Reading the headers of photos."""

import os
import struct
from contextlib import suppress
from typing import BinaryIO, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n\x1a\n"
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats that Pillow may read, whatever a file's name; for EPS it would start Ghostscript."""

ORIENTATION = 0x0112  # the EXIF tag
TIFF_SIZE = (256, 257)  # tags of the width and height as stored
TIFF_BITS, TIFF_PLANES = 258, 284
JPEG_TAGS = b"\xff\xe1"
JPEG_END = b"\xff\xd9"
GREY = ("1", "L", "LA", "I", "I;16", "I;16B")
"""Pillow's modes without colours."""
JPEG_HEADER_BYTES = 1 << 14  # enough for most
DALI_JPEGS = ("Gray", "YCbCr", "RGB", "L")
"""Colours of a JPEG, as libjpeg and Pillow call them; DALI converts the others, CMYK, otherwise."""


class Header(NamedTuple):
    """Facts about an image, from the header of its file."""

    height: int
    """Pixels, upright."""
    width: int
    """Pixels, upright."""
    channels: int
    bits: int
    """Per channel: 8 or 16."""
    orientation: int = 1
    """EXIF orientation of the stored image; 1: upright."""
    raw_offset: int = -1
    """First byte of the pixels if they are uncompressed, interleaved and in one piece, else -1."""
    dali_reads: bool = False
    """True for the kinds of files that DALI was tested to decode to the same pixels, such as whole
    8-bit JPEGs and PNGs."""
    highest: int = -1
    """Masks: the highest index but for `data.ignore_index`."""
    num_bytes: int = -1
    """Size of the file."""
    modified_ns: int = -1
    """When the file was changed last, in ns since 1970."""


HEADER = np.dtype([(name, kind) for name, kind in Header.__annotations__.items()])


def read_photo_header(path: str) -> Header:
    """Read the header of a file in any format that is decoded to 8-bit RGB.

    Raises:
        OSError: the file cannot be read or is not an image.
    """
    with open(path, "rb", buffering=0) as file:
        start = file.read(JPEG_HEADER_BYTES)
        if not start:
            raise OSError("empty file")
        if not start.startswith(JPEG_START):
            return _header_by_pillow(path)
        file.seek(-len(JPEG_END), os.SEEK_END)
        # Without it the JPEG may be cut short, and DALI decodes its upper lines without an error.
        is_whole = file.read() == JPEG_END
    header = None
    if JPEG_TAGS not in start:  # which may hold an orientation
        with suppress(ValueError, KeyError):  # damaged or longer than what was read
            facts = simplejpeg.decode_jpeg_header(start, strict=False)
            header = Header(facts[0], facts[1], 3, 8, dali_reads=facts[2] in DALI_JPEGS)
    header = header or _header_by_pillow(path)
    return header._replace(dali_reads=header.dali_reads and is_whole)


def _header_by_pillow(path: str) -> Header:
    """Read the header of an image in any of `FORMATS`; ten times slower."""
    with open(path, "rb") as file, Image.open(file, formats=FORMATS) as image:
        # The base class's method: that of PNG decodes the image to find tags behind the pixels.
        tags = Image.Image.getexif(image)
        chunks = png_chunks(file) if image.format == "PNG" else {}
        if chunks and ORIENTATION not in tags:
            tags.load(chunks.get(b"eXIf", b""))
        orientation = tags.get(ORIENTATION, 1)
        if orientation not in range(1, 9):
            orientation = 1  # as decoders see it
        size = image.size
        if image.format == "TIFF":  # whose size Pillow may have turned already
            facts = image.tag_v2  # type: ignore[attr-defined]
            size = tuple(facts[tag] for tag in TIFF_SIZE)
            if facts.get(TIFF_PLANES) == 2 and 16 in facts.get(TIFF_BITS, ()):
                raise OSError("Pillow cannot read planes of 16 bits; save its channels interleaved")
        height, width = size if orientation >= 5 else reversed(size)
        dali_reads = image.format in ("JPEG", "MPO") and image.mode in DALI_JPEGS
        if chunks:  # whole, of 8 bits, upright and not animated
            bits = chunks[b"IHDR"][8]
            is_whole = b"IEND" in chunks
            dali_reads = is_whole and bits == 8 and orientation == 1 and b"acTL" not in chunks
        return Header(height, width, 3, 8, orientation, dali_reads=dali_reads)


def is_grey(path: str) -> bool:
    """Return True for an image that is stored without colours."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            return image.mode in GREY
    except Exception:  # damaged bytes make Pillow raise errors of any type
        return False


def png_chunks(file: BinaryIO) -> dict[bytes, bytes]:
    """Return the names of all chunks of a PNG, with the content of the header and the EXIF tags."""
    found = {}
    file.seek(len(PNG_START))
    while len(start := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", start)
        found[name] = file.read(length) if name in (b"IHDR", b"eXIf") else b""
        file.seek(length * (not found[name]) + 4, os.SEEK_CUR)  # to behind the checksum
    return found
