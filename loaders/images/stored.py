"""TIFFs of any number of channels, whose pixels stay as they are: uint8 or uint16."""

import math
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from PIL.ExifTags import Base as Tag
from tifffile import TiffFile, imread

from conf.schema import DataConfig
from loaders.images.headers import Content, Header, check_pages, header_of

PLANES = 2  # a planar configuration
GREY, RGB = 1, 2  # photometric interpretations
NONE, LZW, DEFLATE = 1, 5, (8, 32946)  # compressions


def read_page(file: BinaryIO) -> Any:
    """Return facts about the only page of a TIFF, tifffile's `TiffPage`."""
    with TiffFile(file) as tiff:
        check_pages(sum(not page.is_reduced for page in tiff.pages))
        return tiff.pages.first


def read_header(file: BinaryIO, data: DataConfig) -> Header:
    """Raises ValueError: its pixels are of another type."""
    page = read_page(file)
    if page.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"has pixels of type {page.dtype}; convert them to uint8 or uint16")
    bits = 8 * page.dtype.itemsize
    header = header_of(page.imagelength, page.imagewidth, page.samplesperpixel, bits, 1, data)
    is_interleaved = page.planarconfig != PLANES or page.samplesperpixel == 1
    is_plain = is_interleaved and page.fillorder == 1 and page.bitspersample == bits
    is_native = bits == 8 or page.parent.byteorder == "<"
    is_raw = is_plain and is_native and page.is_contiguous and page.predictor == 1
    by_dali = is_plain and page.tags.valueof(Tag.Orientation, 1) not in range(2, 9)
    by_dali = by_dali and page.photometric in (GREY, RGB)
    by_dali = by_dali and page.compression in (NONE, LZW, *DEFLATE)
    return header._replace(raw_offset=page.dataoffsets[0] if is_raw else -1, dali=by_dali)


def decode(content: Content, header: np.void, *_: Any) -> np.ndarray:
    """Decode to the header's channels and bits."""
    shape = header[["height", "width", "channels"]].item()
    dtype = np.dtype(f"uint{header['bits']}")
    if (start := int(header["raw_offset"])) >= 0:  # tifffile takes 40 to 80 times as long
        if len(content) < start + math.prod(shape) * dtype.itemsize:
            raise OSError("it is cut short")
        pixels = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
        return np.require(pixels, requirements=["A", "W"])
    image = imread(BytesIO(content), maxworkers=1)  # other threads read other files
    if image.shape != shape[: image.ndim]:
        image = np.moveaxis(image, 0, -1)
    return np.ascontiguousarray(image.reshape(shape), dtype)
