"""TIFFs: photos, masks, and those whose channels are kept as they are stored."""

import math
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from loaders.images.headers import ORIENTATION, Header, orientation_in

# tifffile is imported where a TIFF is read, since that takes 0.1 s.

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Numbers that TIFFs have for colours, compressions, planes and alpha.
INVERTED_GREY, GREY, RGB, PALETTE, CMYK, YCBCR = 0, 1, 2, 3, 5, 6
NONE, LZW, JPEG, DEFLATE = 1, 5, 7, (8, 32946)
PLANES = 2
ALPHA = ((1,), (2,))  # multiplied with the colours, and not
MOST_BITS = {
    **{(INVERTED_GREY, 1, False): 8, (GREY, 1, False): 16, (GREY, 2, True): 8},
    **{(RGB, 3, False): 16, (RGB, 4, True): 16, (PALETTE, 1, False): 8},
    **{(CMYK, 4, False): 16, (YCBCR, 3, False): 8},
}
"""Photos that Pillow reads right: colours, channels and whether one of them is alpha -> bits."""


def read_tiff_header(file: str | BinaryIO, content: str, background: int) -> Header:
    """Read the header of a TIFF; see `read_header`."""
    from tifffile import TiffFile

    with TiffFile(file) as tiff:
        page, num_pages = tiff.pages.first, sum(not page.is_reduced for page in tiff.pages)
        if num_pages != 1:
            raise ValueError(f"has {num_pages} pages, not 1; split it into files of one page")
        tag = page.tags.get(ORIENTATION)
        orientation = 1 if tag is None else orientation_in({ORIENTATION: tag.value})
        stored = Header(page.imagelength, page.imagewidth, 3, 8)
        if content == "stored":
            is_native = tiff.byteorder == "<"
            return _stored_header(page, stored, is_native, is_upright=orientation == 1)
        if content == "rgb":
            stored = _photo_header(page, stored, background)
            with Image.open(file, formats=["TIFF"]) as image:  # which looks at XMP, too
                upright = stored.turned(orientation_in(image.getexif()))
            return upright if upright.orientation == orientation else upright._replace(dali=0)
        return stored.turned(orientation)


def _stored_header(page: Any, header: Header, is_native: bool, is_upright: bool) -> Header:
    """Complete the header of a `tifffile.TiffPage` whose channels are kept; `is_native`: it has
    this machine's order of bytes."""
    if page.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"has pixels of type {page.dtype}; convert them to uint8 or uint16")
    bits = 8 * page.dtype.itemsize
    is_interleaved = page.planarconfig != PLANES or page.samplesperpixel == 1
    is_plain = is_interleaved and page.fillorder == 1 and page.bitspersample == bits
    is_raw = is_plain and page.is_contiguous and page.predictor == 1 and (bits == 8 or is_native)
    by_dali = is_plain and page.compression in (NONE, LZW, *DEFLATE)
    return header._replace(
        channels=page.samplesperpixel,
        bits=bits,
        raw_offset=page.dataoffsets[0] if is_raw else -1,
        dali=2 if by_dali and is_upright and page.photometric in (GREY, RGB) else 0,
    )


def _photo_header(page: Any, header: Header, background: int) -> Header:
    """Complete the header of a TIFF that becomes 8-bit RGB."""
    bits, colours, channels = page.bitspersample, page.photometric, page.samplesperpixel
    has_alpha = page.extrasamples in ALPHA
    most_bits = MOST_BITS.get((colours, channels, has_alpha), 0)
    if channels > 1 and page.planarconfig == PLANES:
        most_bits = min(most_bits, 8)
    if colours == YCBCR and page.compression != JPEG:
        most_bits = 0
    is_unsigned = np.dtype(page.dtype).kind in "bu"
    if not is_unsigned or bits not in (1, 2, 4, 8, 16) or bits > most_bits:
        raise ValueError(
            f"is a TIFF of {channels} channels of {page.dtype} (bits {bits}, photometric "
            f"{colours:d}, planes {page.planarconfig:d}), which does not become 8-bit RGB; "
            "data=cells reads any channels of 8 or 16 bits"
        )
    by_dali = bits >= 8 and not has_alpha and (colours, bits) != (CMYK, 16)
    by_dali = by_dali and page.compression in (NONE, LZW, JPEG, *DEFLATE)
    return header._replace(background=background if has_alpha else -1, dali=2 if by_dali else 0)


def read_tiff(content: bytes | bytearray) -> np.ndarray:
    """Decode a TIFF as tifffile does, in this thread alone: others read other files."""
    from tifffile import imread

    return imread(BytesIO(content), maxworkers=1)


def decode_tiff(content: bytes | bytearray, header: np.void) -> np.ndarray:
    """Decode a TIFF as stored, (height, width, channels) uint8 or uint16."""
    dtype = np.dtype(np.uint16 if header["bits"] == 16 else np.uint8)
    shape = (int(header["height"]), int(header["width"]), int(header["channels"]))
    if header["raw_offset"] >= 0:
        start, num_bytes = int(header["raw_offset"]), math.prod(shape) * dtype.itemsize
        if len(content) < start + num_bytes:
            raise OSError("it is cut short")
        pixels = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
        return np.require(pixels, requirements=["A", "W"])
    image = read_tiff(content)
    if image.shape != shape[: image.ndim]:
        image = np.moveaxis(image, 0, -1)
    return np.ascontiguousarray(image.reshape(shape), dtype)
