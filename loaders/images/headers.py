"""The headers of image files, and reading those of all formats but TIFF."""

import errno
import os
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

JPEG_START, JPEG_TAGS, JPEG_END = b"\xff\xd8\xff", b"\xff\xe1", b"\xff\xd9"
PNG_START = b"\x89PNG\r\n\x1a\n"
JPEG_2000_START, JPEG_2000_BITS = b"\xff\x4f\xff\x51", 42  # place of the bits behind it
BMP_BITS = slice(28, 29)  # place in the file
PNG_PALETTE = 3  # kind of colours
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats that Pillow may read, whatever a file's name; for EPS it would start Ghostscript."""

ORIENTATION = 0x0112  # the EXIF tag
HEADER_BYTES = 1 << 14  # enough for most
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
    """What `fn.decoders.image` of DALI 2.4 did with such files on a CPU. 0: it cannot read them;
    1: it gave other pixels than Pillow, or those of a part of the file; 2: the same within 1."""
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


def read_ends(path: str) -> tuple[bytes, bytes]:
    """Return the first bytes of a file, and the last two.

    Raises:
        OSError: it cannot be read, is empty, or is none: opening a pipe would wait for ever.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is a folder, pipe, socket or device")
    if found.st_size < len(JPEG_END):
        raise OSError("empty file")
    with open(path, "rb", buffering=0) as file:
        start = file.read(HEADER_BYTES)
        file.seek(-len(JPEG_END), os.SEEK_END)
        return start, file.read()


def read_pillow_header(path: str, start: bytes, end: bytes, background: int) -> Header:
    """Read the header of an image that is no TIFF; see `read_header`.

    Args:
        path, background: see there.
        start, end: what `read_ends` returns of the file.
    """
    header = None
    if start.startswith(JPEG_START) and JPEG_TAGS not in start:  # which may hold an orientation
        with suppress(ValueError, KeyError):  # damaged or longer than what was read
            height, width, *_ = simplejpeg.decode_jpeg_header(start, strict=False)
            header = Header(height, width, 3, 8, dali=2)
    header = header or _opened_header(path, start, background)  # takes four times as long
    if start.startswith(JPEG_START) and end != JPEG_END:
        return header._replace(dali=1)  # it may be cut short: DALI may decode what there is
    return header


def _opened_header(path: str, start: bytes, background: int) -> Header:
    with open(path, "rb") as file, Image.open(file, formats=FORMATS) as image:
        chunks = png_chunks(file) if image.format == "PNG" else {}
        _check_pixels(image, start, chunks)
        # The base class's method: that of PNG decodes the image to find tags behind the pixels.
        tags, tags_for_dali = Image.Image.getexif(image), Image.Exif()
        if chunks and ORIENTATION not in tags:
            tags.load(chunks.get(b"eXIf", b""))
        tags_for_dali.load(image.info.get("exif", b""))  # not those of XMP, for example
        is_alike = orientation_in(tags) == orientation_in(tags_for_dali)
        if image.has_transparency_data:
            is_alike = False
        else:
            background = -1
        is_readable = {
            "JPEG": True,
            "MPO": True,
            "PNG": b"IEND" in chunks,
            "BMP": start[BMP_BITS] != b"\x10",
            "WEBP": "exif" not in image.info,
        }.get(str(image.format), False)
        stored = Header(image.height, image.width, 3, 8, background=background)
        if is_readable:
            stored = stored._replace(dali=2 if is_alike else 1)
        return stored.turned(orientation_in(tags))


def _check_pixels(image: Image.Image, start: bytes, chunks: dict[bytes, bytes]) -> None:
    """Raise ValueError for an image that Pillow would decode to wrong pixels."""
    if image.mode == "F":
        raise ValueError("has floats as pixels; save it with 8 or 16 bits")
    if image.format == "JPEG2000":
        at = start.find(JPEG_2000_START)
        if at < 0 or start[at + JPEG_2000_BITS] > 7:  # one less, and 128 more if signed
            raise ValueError("is a JPEG 2000 of more than 8 bits; save it as a PNG")
    if b"tRNS" in chunks:
        bits, colours = chunks[b"IHDR"][8:10]
        if bits != 8 and colours != PNG_PALETTE:
            raise ValueError(f"has a transparent colour of {bits} bits; save it with 8 bits")


def orientation_in(tags: Mapping[int, Any]) -> int:
    """Return the EXIF orientation among tags; 1 in place of those that decoders do not know."""
    orientation = tags.get(ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def png_chunks(file: BinaryIO) -> dict[bytes, bytes]:
    """Return the names of all chunks of a PNG, with the content of the header and the EXIF tags."""
    found = {}
    file.seek(len(PNG_START))
    while len(start := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", start)
        found[name] = file.read(length) if name in (b"IHDR", b"eXIf") else b""
        file.seek(length * (not found[name]) + 4, os.SEEK_CUR)  # to behind the checksum
    return found


def reason_of(error: Exception, path: str) -> str:
    """Return the reason why reading a file failed, without its path.

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
    return " ".join(str(error).replace(path, "").split()) or type(error).__name__
