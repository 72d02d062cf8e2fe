"""Files that are replaced atomically, and their checksums."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Give the block a temporary file to write, which replaces `path` at the end of the block.

    After a crash or an error in the block there is either the old file or the complete new one. An
    OSError without a name, as of a full disk, gets that of the file.
    """
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    temporary.touch()
    mode = temporary.stat().st_mode  # as the umask says; safetensors gives the owner alone access
    try:
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file's content to disk, or the names of a folder's files."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while content := file.read(1 << 20):
            value = zlib.crc32(content, value)
    return value
