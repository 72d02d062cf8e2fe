"""Masks: images whose pixels are indices of classes."""

from io import BytesIO

import numpy as np
from PIL import Image

from conf.errors import counted
from loaders.images.headers import FORMATS

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_BITS = 24  # place in a PNG


def decode_mask(content: bytes | bytearray) -> np.ndarray:
    """Decode a mask to indices of classes, (height, width, 1) uint8 or uint16, as stored. Of a
    palette image it returns the indices, not the colours.

    Raises:
        OSError: it is not an image or is truncated.
        ValueError: it holds something else than one index per pixel.
    """
    wanted = (
        "store class indices as a PNG or TIFF of one channel with 8 or 16 bits, or with a palette"
    )
    if content.startswith(TIFF_STARTS):
        from tifffile import imread

        image = imread(BytesIO(content), maxworkers=1).squeeze()
        kind = f"shape {image.shape} of {image.dtype}"
    else:
        with Image.open(BytesIO(content), formats=FORMATS) as stored:
            kind = f"{stored.format} of mode {stored.mode}"
            if stored.format == "JPEG":
                raise ValueError(f"is a JPEG, which changes indices; {wanted}")
            if stored.format == "PNG" and stored.mode == "L" and content[PNG_BITS] < 8:
                raise ValueError(
                    f"has {counted(content[PNG_BITS], 'bit')} of grey per pixel; {wanted}"
                )
            if stored.mode not in ("P", "L", "1", "I", "I;16", "I;16B"):
                raise ValueError(f"is a {kind}; {wanted}")
            image = np.array(stored)
    if image.dtype == bool:
        image = image.astype(np.uint8)
    elif image.dtype == np.int32:  # how Pillow returns PGMs, and older versions PNGs, of 16 bits
        image = image.astype(np.uint16)
    if image.ndim != 2 or image.dtype.newbyteorder("=") not in (np.uint8, np.uint16):
        raise ValueError(f"is a {kind}; {wanted}")
    return np.ascontiguousarray(image, image.dtype.newbyteorder("="))[..., None]
