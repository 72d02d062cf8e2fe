"""Masks: the index of a class for each pixel; of an image with a palette, not its colours."""

from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from PIL import Image
from PIL.ExifTags import Base as Tag
from tifffile import imread

from conf.errors import counted
from conf.schema import DataConfig
from loaders.images.headers import FORMATS, PNG_BITS, Content, Header, header_of, orientation_of
from loaders.images.stored import read_page

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
LOSSLESS = ("PNG", "BMP", "GIF")  # formats of Pillow that keep indices


def read_header(file: BinaryIO, data: DataConfig) -> Header:
    """Raises ValueError: see `decode`; or there are indices below 0 but `data.ignore_index`."""
    content = file.read()
    if content.startswith(TIFF_STARTS):
        page = read_page(BytesIO(content))
        size = page.imagelength, page.imagewidth
        orientation = page.tags.valueof(Tag.Orientation, 1)
    else:
        with Image.open(file, formats=FORMATS) as image:
            size, orientation = image.size[::-1], orientation_of(image, file)
    header = header_of(*size, 1, 8, orientation, data)  # before too many pixels are decoded
    indices = decode(content)
    counts = indices[indices != data.ignore_index]
    if counts.size and counts.min() < 0:
        raise ValueError(
            f"holds {counts.min()}, which is no class; set data.ignore_index={counts.min()} if "
            "it means none"
        )
    highest = int(counts.max()) if counts.size else -1
    return header._replace(bits=8 * indices.itemsize, highest=highest)


def decode(content: Content, *_: Any) -> np.ndarray:
    """Decode to (height, width, 1) of uint8 or uint16, or of int32 if some are below 0.

    Raises:
        OSError: it is not an image or is truncated.
        ValueError: it holds something else than one index from 0 to 65535, or below 0, per pixel.
    """
    wanted = "store class indices as a PNG or TIFF of one channel of integers, or with a palette"
    if content.startswith(TIFF_STARTS):
        image = imread(BytesIO(content), maxworkers=1).squeeze()
        kind = f"shape {image.shape} of {image.dtype}"
    else:
        with Image.open(BytesIO(content), formats=FORMATS) as stored:
            kind = f"{stored.format} of mode {stored.mode}"
            if stored.format not in LOSSLESS:
                raise ValueError(f"is a {stored.format}, which may change indices; {wanted}")
            if kind == "PNG of mode L" and content[PNG_BITS] < 8:
                raise ValueError(
                    f"has {counted(content[PNG_BITS], 'bit')} of grey per pixel; {wanted}"
                )
            image = np.array(stored)
    if image.ndim != 2 or image.dtype.kind not in "bui":
        raise ValueError(f"is a {kind}; {wanted}")
    if image.dtype in (bool, np.uint8):
        return image.astype(np.uint8)[..., None]
    low, high = int(image.min()), int(image.max())
    if high > 65535 or low < -32768:
        raise ValueError(f"holds {high if high > 65535 else low}; indices are 0 to 65535")
    return image.astype(np.uint16 if low >= 0 else np.int32)[..., None]
