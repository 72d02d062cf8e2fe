"""From the bytes of image files to pixels."""

from loaders.images.decoding import decode, decode_resized, resize
from loaders.images.headers import HEADER, Header, read_header, reason_of
