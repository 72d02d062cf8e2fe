"""From the bytes of image files to pixels."""

from loaders.images.decoders import decode, read_header, reason_of, resize
from loaders.images.headers import HEADER, Header, is_grey
from loaders.images.partial import decode_partly
