"""TIFFs whose pixels are kept as they are stored: channels of 8 or 16 bits, and masks.

Pillow reads those that are photos.
"""

import math
from io import BytesIO

import numpy as np

from loaders.images.headers import ORIENTATION, PLANES, Header, orientation_in

# tifffile is imported where a TIFF is read, since that takes 0.1 s.

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Numbers that TIFFs have for colours and compressions.
GREY, RGB = 1, 2
NONE, LZW, DEFLATE = 1, 5, (8, 32946)


def read_tiff_header(path: str, content: str) -> Header:
    """Read the header of a TIFF whose content is `stored` or `indices`; see `read_header`."""
    from tifffile import TiffFile

    with TiffFile(path) as tiff:
        page, num_pages = tiff.pages.first, sum(not page.is_reduced for page in tiff.pages)
        if num_pages != 1:
            raise ValueError(f"has {num_pages} pages, not 1; split it into files of one page")
        tag = page.tags.get(ORIENTATION)
        orientation = 1 if tag is None else orientation_in({ORIENTATION: tag.value})
        if content == "indices":
            return Header(page.imagelength, page.imagewidth, 1, 8).turned(orientation)
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
            page.imagelength,
            page.imagewidth,
            page.samplesperpixel,
            bits,
            raw_offset=page.dataoffsets[0] if is_raw else -1,
            dali=2 if by_dali else 0,
        )


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
