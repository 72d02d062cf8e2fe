"""Files that are replaced atomically, and their checksums."""

import os
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

import psutil

UNFINISHED = ".unfinished"
"""Start of the names of files that are being written."""

DAY_S = 86400.0


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Give the block a temporary file to write, which replaces `path` at the end of the block.

    After a crash or an error in the block there is either the old file or the complete new one. An
    OSError without a name, as of a full disk, gets that of the file.
    """
    remove_unfinished(path.parent)
    name = f"{UNFINISHED}-{pid_namespace()}-{os.getpid()}-{uuid4().hex}{path.suffix}"
    temporary = path.with_name(name)
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


@cache
def remove_unfinished(folder: Path) -> None:
    """Remove what processes that were killed have left in a folder, once in each process: files of
    this machine's processes, and those of others after a day."""
    for file in folder.glob(f"{UNFINISHED}-*"):
        with suppress(OSError, ValueError):  # another process has removed it, or named it
            _, namespace, pid, _ = file.name.split("-", 3)
            is_old = time.time() - file.stat().st_mtime > DAY_S
            if is_old or (namespace == pid_namespace() and not psutil.pid_exists(int(pid))):
                file.unlink()


def pid_namespace() -> str:
    """Return a short name for the processes among which an id is unique: a machine's or, as two
    containers that share a disk may have equal ids, a container's."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{zlib.crc32(f'{socket.gethostname()} {namespace}'.encode()):08x}"


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
