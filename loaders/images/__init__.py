"""From the bytes of image files to pixels."""

from loaders.images.decoding import decode, decode_resized, read_header, resize
from loaders.images.headers import HEADER, WHITE, Header, reason_of
