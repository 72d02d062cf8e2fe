"""What no library does with a JPEG file: leave out its lower lines.

A crop needs the lines above its lower edge only. libjpeg stops where the header says that the image ends.
It then warns of the bytes that are left, which hides what else it would have warned of: only a file
that was decoded as a whole before may be shortened.
"""

START = b"\xff\xd8\xff"
BASELINE, SCAN = (0xC0, 0xC1), 0xDA
"""Markers of headers of images whose blocks lie line by line, and of the scan, where these begin."""

BELOW = 2
"""Lines to decode beyond those that are needed: in the last one, libjpeg has no colour of the next to blend with."""

LEAST_LEFT_OUT = 8
"""Fewer lines are decoded in one go with those above: blocks have at least as many."""


def upper_lines(content: bytes | bytearray, num_lines: int, factor: int) -> bytearray | None:
    """The same JPEG with a header that tells little more than `num_lines` lines.

    None if there is nothing to leave out, or libjpeg would decode all of it nevertheless.

    Args:
        content: of the file, which libjpeg can decode. A bytearray is changed itself.
        num_lines: in pixels as stored.
        factor: by which the image will be reduced.
    """
    at = 2
    while at + 6 < len(content) and content[at] == 0xFF and content[at + 1] != SCAN:
        if content[at + 1] in BASELINE:
            height = slice(at + 5, at + 7)
            needed = num_lines + BELOW * factor
            if needed + LEAST_LEFT_OUT > int.from_bytes(content[height]):
                return None
            upper = content if isinstance(content, bytearray) else bytearray(content)
            upper[height] = needed.to_bytes(2)
            return upper
        at += 2 + int.from_bytes(content[at + 2 : at + 4])
    return None
