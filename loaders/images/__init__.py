"""From the bytes of image files to pixels."""

from loaders.images.decoders import decode, decode_resized, read_raw, reason_of
from loaders.images.headers import HEADER, Header, read_header, read_mask
from loaders.images.resizing import factor_for, resize

__all__ = [
    "HEADER",
    "Header",
    "decode",
    "decode_resized",
    "factor_for",
    "read_header",
    "read_mask",
    "read_raw",
    "reason_of",
    "resize",
]
