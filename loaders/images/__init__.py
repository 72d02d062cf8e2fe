"""From the bytes of image files to pixels."""

from loaders.images.decoders import decode, decode_resized, read_header, reason_of, resize
from loaders.images.headers import HEADER, Header, is_grey
