"""Files that are replaced atomically, and their checksums."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Give the block a temporary file to write, which replaces `path` at the end of the block.

    After a crash or an error in the block there is either the old file or the complete new one. An
    OSError without a name, as of a full disk, gets that of the file.
    """
    # Not the process id: processes of two containers that share a disk may have the same one.
    temporary = path.with_name(f".{path.stem}.{uuid4().hex}{path.suffix}")
    temporary.touch()
    mode = temporary.stat().st_mode  # as the umask says; safetensors gives the owner alone access
    try:
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Write the names of a folder's files to disk, as `os.fsync` does with their content."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while content := file.read(1 << 20):
            value = zlib.crc32(content, value)
    return value
