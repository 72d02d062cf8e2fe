"""Files that are replaced atomically."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Give the block a temporary file to write, which replaces `path` at the end of the block.

    After a crash or an error in the block there is either the old file or the complete new one.
    What a killed process has left goes when `path` is written again. Of two processes that write it
    at once, the first one fails. An OSError without a name, as of a full disk, gets the file's.
    """
    folder = path.with_name(f".{path.name}.tmp")
    temporary = folder / f"{uuid4().hex}{path.suffix}"  # which no other process replaces
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        temporary.touch()
        mode = temporary.stat().st_mode  # by the umask; safetensors' own is for the owner alone
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
        with suppress(OSError):  # another process writes there
            folder.rmdir()
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file's content to disk, or the names of a folder's files."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
