"""Photos, which become RGB of 8 bits whatever their format."""

import re
import zlib
from contextlib import suppress
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
import simplejpeg
from imagecodecs import SpngError, spng_decode
from PIL import Image
from PIL.ExifTags import Base as Tag

from conf.schema import DataConfig
from loaders.images.headers import (
    FORMATS,
    PNG_BITS,
    PNG_START,
    Content,
    Header,
    check_pages,
    header_of,
    orientation_of,
)

JPEG_START = b"\xff\xd8\xff"
# Places in a PNG: its header with the checksum, and in it the height and the kind of pixels.
PNG_HEADER, PNG_CHECKSUM = slice(12, 29), slice(29, 33)
PNG_HEIGHT, PNG_PIXELS = slice(20, 24), slice(24, 29)
PLAIN_RGB = b"\x08\x02\0\0\0"  # 8 bits, RGB, compression, filter, not interlaced
TIFF_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B")
UNSIGNED, PLANES = 1, 2  # a sample format and a planar configuration of TIFFs
DALI_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "TIFF")
DALI_COMPRESSIONS = ("raw", "tiff_lzw", "jpeg", "tiff_adobe_deflate", "tiff_deflate")  # of TIFFs


def read_header(file: BinaryIO, data: DataConfig) -> Header:
    """Raises ValueError: its pixels cannot become 8-bit RGB without a change."""
    start = file.read(PNG_BITS + 1)
    with Image.open(file, formats=FORMATS) as image:
        kind, (width, height) = image.format, image.size
        if kind == "TIFF":
            tags = _checked_tags(image)
            # As stored: `size` is upright.
            height, width = tags[Tag.ImageLength], tags[Tag.ImageWidth]
        elif image.mode == "F":
            raise ValueError("has floats as pixels; save it with 8 or 16 bits")
        has_clear_colour = kind == "PNG" and image.mode != "P" and "transparency" in image.info
        if has_clear_colour and (bits := start[PNG_BITS]) != 8:  # Pillow compares 8 of them
            raise ValueError(f"has a transparent colour of {bits} bits; save it with 8 bits")
        header = header_of(height, width, 3, 8, orientation_of(image, file), data)
        if image.has_transparency_data:
            return header._replace(background=int.from_bytes(bytes(data.background)))
        return header._replace(dali=_dali_reads(image, header.orientation))


def _checked_tags(image: Any) -> Any:
    """Return the tags of a `TiffImageFile`; raise ValueError if Pillow would decode it to other
    pixels."""
    tags = image.tag_v2
    check_pages(image.n_frames)
    bits = tags.get(Tag.BitsPerSample, (1,))[0]
    is_inverted = tags[Tag.PhotometricInterpretation] == 0
    if (
        image.mode not in TIFF_MODES
        or bits not in (1, 2, 4, 8, 16)
        or tags.get(Tag.SamplesPerPixel, 1) != len(image.getbands())
        or tags.get(Tag.SampleFormat, (UNSIGNED,))[0] != UNSIGNED
        or (bits == 16 and (is_inverted or tags.get(Tag.PlanarConfiguration) == PLANES))
        or (image.mode == "YCbCr" and image.info["compression"] != "jpeg")
    ):
        raise ValueError(
            f"is a TIFF of {bits} bits and mode {image.mode}, which does not become 8-bit RGB; "
            "data=cells reads any channels of 8 or 16 bits"
        )
    return tags


def _dali_reads(image: Image.Image, orientation: int) -> bool:
    """Return `Header.dali` of an opaque image that Pillow has opened."""
    if image.format == "TIFF":
        return image.info["compression"] in DALI_COMPRESSIONS
    # It does not look for tags in XMP, nor in a WebP.
    finds_tags = "exif" in image.info and image.format != "WEBP"
    return image.format in DALI_FORMATS and (orientation == 1 or finds_tags)


def decode(content: Content, header: np.void, num_lines: int, factor: int) -> np.ndarray:
    """Decode to RGB or, if the header has one channel, to grey."""
    stored = None
    if content.startswith(JPEG_START):
        stored_width = int(header["width" if header["orientation"] < 5 else "height"])
        stored = _decode_jpeg(content, -(-stored_width // factor) if factor > 1 else 0)
    elif content.startswith(PNG_START):
        stored = _decode_png(content, header, num_lines)
    if stored is None:
        stored = _decode_by_pillow(content, int(header["background"]))
    if header["channels"] == 1:  # the model takes grey images
        return np.array(Image.fromarray(stored).convert("L"))[..., None]
    return stored


def _decode_jpeg(content: Content, min_width: int) -> np.ndarray | None:
    """Decode a JPEG to RGB, at the smallest of its sizes 1, 1/2, 1/4 and 1/8 that is `min_width`
    pixels wide (0: at 1); None: libjpeg finds it unusual, but Pillow may read it.

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


def _decode_png(content: Content, header: np.void, num_lines: int) -> np.ndarray | None:
    """Decode an opaque PNG of 8-bit RGB whose lines are stored in order; None: it is another one,
    or is damaged, and Pillow says how.

    If lines at the top are enough, it is decoded by a header with their number, where libspng
    stops. Without it, loader=pytorch has 0.71 times the speed on PNG pairs of 1280x720 cropped to
    256. All checksums are compared: libspng would not see later damage.
    """
    if content[PNG_PIXELS] != PLAIN_RGB or header["background"] >= 0:
        return None
    if num_lines < header["height"] and header["orientation"] == 1:
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
    """Decode any photo; transparent pixels show the background, if there is one."""
    with Image.open(BytesIO(content), formats=FORMATS) as stored:
        stored.getexif()[Tag.Orientation] = 1  # else Pillow would turn a TIFF, and nothing else
        if stored.mode.startswith("I"):  # 16 bits, which convert("RGB") would clip, not scale
            grey = (np.asarray(stored.convert("I")) >> 8).astype(np.uint8)
            return np.stack([grey] * 3, axis=2)
        if background < 0:
            return np.array(stored.convert("RGB"))
        photo = stored.convert("RGBA")
        image = Image.new("RGB", photo.size, f"#{background:06x}")
        image.paste(photo, mask=photo)
        return np.array(image)
