"""TIFFs with any number of channels, which are kept as they are stored."""

import math
from io import BytesIO
from typing import BinaryIO

import numpy as np

from loaders.images.headers import ORIENTATION, Header

DALI_TIFFS = (1, 5, 8, 32946), (1, 2)
"""Compression (none, LZW, deflate) and colours (grey from black, RGB) by their numbers in TIFFs."""


def read_tiff_header(file: str | BinaryIO) -> Header:
    """Read the header of a TIFF whose channels are kept as they are.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a TIFF with a single image of 8 or 16 bits.
    """
    from tifffile import TiffFile

    with TiffFile(file) as tiff:
        page = tiff.pages.first
        if len(tiff.pages) != 1:
            raise ValueError(f"has {len(tiff.pages)} pages, not 1; split it into files of one page")
        if page.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"has pixels of type {page.dtype}; convert them to uint8 or uint16")
        planar = page.planarconfig == 2 and page.samplesperpixel > 1
        is_native = page.dtype == np.uint8 or tiff.byteorder == "<"
        is_plain = page.fillorder == 1 and page.bitspersample == 8 * page.dtype.itemsize
        compressions, colours = DALI_TIFFS
        return Header(
            height=page.imagelength,
            width=page.imagewidth,
            channels=page.samplesperpixel,
            bits=8 * page.dtype.itemsize,
            raw_offset=page.dataoffsets[0]
            if page.is_contiguous and page.predictor == 1 and not planar and is_native and is_plain
            else -1,
            dali_reads=is_plain
            and not planar
            and page.compression in compressions
            and page.photometric in colours
            and (ORIENTATION not in page.tags or page.tags[ORIENTATION].value == 1),
        )


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
    from tifffile import imread

    image = imread(BytesIO(content), maxworkers=1)  # other threads read other files
    if image.shape != shape[: image.ndim]:
        image = np.moveaxis(image, 0, -1)
    return np.ascontiguousarray(image.reshape(shape), dtype)
