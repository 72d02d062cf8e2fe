"""Whether a file is still the one that was indexed, by its size and its time of change."""

import os
from datetime import datetime

Stamp = tuple[int, int]
"""Size of a file in bytes, and when it was changed last, in ns since 1970."""


def stamp_of(stat: os.stat_result) -> Stamp:
    return stat.st_size, stat.st_mtime_ns


class ChangedError(OSError):
    """A file is another one than was indexed; the message says what has changed."""


def compare_stamps(then: Stamp, now: Stamp) -> None:
    """Raises ChangedError if the stamp of a file is not the one it had when it was indexed."""
    if then == now:
        return
    if then[0] != now[0]:
        raise ChangedError(f"{then[0]:,} bytes when it was indexed, {now[0]:,} now")
    before, after = (
        datetime.fromtimestamp(stamp[1] / 1e9).isoformat(" ", "microseconds")
        for stamp in (then, now)
    )
    raise ChangedError(f"modified {before} when it was indexed, {after} now")
