"""Masks: images whose pixels are indices of classes."""

from io import BytesIO

import numpy as np
from PIL import Image

from conf.errors import counted
from loaders.images.headers import FORMATS, PNG_BITS
from loaders.images.tiff import TIFF_STARTS, read_tiff

LOSSLESS = ("PNG", "BMP", "GIF")  # formats of Pillow that keep indices


def decode_mask(content: bytes | bytearray) -> np.ndarray:
    """Decode a mask to indices of classes as stored, (height, width, 1): uint8 or uint16, or int32
    if some are below 0. Of an image with a palette it returns the indices, not the colours.

    Raises:
        OSError: it is not an image or is truncated.
        ValueError: it holds something else than one index from 0 to 65535, or below 0, per pixel.
    """
    wanted = "store class indices as a PNG or TIFF of one channel of integers, or with a palette"
    if content.startswith(TIFF_STARTS):
        image = read_tiff(content).squeeze()
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
