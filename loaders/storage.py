"""Where data lies: byte ranges of files under one root, be it a folder, a web server or a bucket."""

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from conf.mistakes import Mistake
from conf.schema import DataConfig

REMOTE = ("http", "https", "s3", "gs")
"""Schemes of a root that is read over the network."""

OPEN_FILES = 64
"""Files that a process keeps open to read ranges of them."""

READING_THREADS = 16
"""Ranges of files that a process reads at once; more than cores, because a disk or NFS keeps them waiting."""

CUT = "it was cut or written anew: make the index again, or bring back the file"

T = TypeVar("T")


class StorageError(OSError):
    """What was asked for cannot be had; the message says where, what was seen, how often it was tried, the fix."""

    def __init__(self, message: str, may_pass: bool = True) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        """Whether another attempt of the run may succeed."""


class MissingError(StorageError, FileNotFoundError):
    """There is no file of that name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, may_pass=False)


class Storage(ABC):
    """Files under a root, read by ranges of bytes. Used by any number of threads; each process that gets a
    pickled one opens it anew.

    Names are relative to the root, with `/` between their parts. All methods but `begin` and `exists` raise
    `StorageError` where there is no such file, or it cannot be had for `data.retry_s`.
    """

    root: str
    """As it was given; `without_credentials(root)` is what may be shown."""

    @property
    def origin(self) -> "Storage":
        """The storage itself, or what it holds copies of."""
        return self

    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes of a file from `start` up to `end`, which is not among them; exactly so many."""
        return self.begin(name, start, end).result()

    @abstractmethod
    def begin(self, name: str, start: int, end: int) -> Future[bytes]:
        """As `read`, without waiting; the future may be cancelled."""

    def read_whole(self, name: str) -> bytes:
        """All bytes of a file."""
        return self.read(name, 0, self.size(name))

    @abstractmethod
    def write(self, name: str, path: Path) -> None:
        """Store a copy of a local file, whole or not at all; one that is there is replaced."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Size of a file in bytes."""


def open_storage(root: str, data: DataConfig) -> Storage:
    """The storage that a root names.

    Args:
        root: a folder, or an address that begins with `file://`, `http://`, `https://`, `s3://` or `gs://`.
        data: says for how long a storage may stay away.

    Raises:
        Mistake: another scheme, or a package that is not installed.
    """
    scheme = is_remote(root)
    if not scheme:
        return Folder(root)
    from loaders.bucket import Bucket
    from loaders.shard_cache import CachedBucket

    bucket = Bucket(root, data.retry_s)
    if not data.cache_gb:
        return bucket
    return CachedBucket(bucket, Path(data.cache_dir, "shards"), int(data.cache_gb * 1e9))


def is_remote(root: str) -> str:
    """The scheme of a root that is read over the network; empty for a folder.

    Raises:
        Mistake: the scheme is none of those that can be read.
    """
    scheme = root.partition("://")[0] if "://" in root else "file"
    if scheme in REMOTE:
        return scheme
    if scheme != "file":
        raise Mistake(
            f"{without_credentials(root)}: {scheme}:// cannot be read; use a folder or one of "
            + ", ".join(f"{name}://" for name in REMOTE)
        )
    return ""


def without_credentials(text: str) -> str:
    """A text whose addresses have lost user, password and query, so that it may be shown."""
    return re.sub(r"(\w://)(?:[^\s/?#]*@)?([^\s?#)\"']*)[^\s)\"']*", r"\1\2", text)


class OpenFile:
    """A descriptor that is closed when nobody uses it any more, in whatever thread."""

    def __init__(self, path: str | Path, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self.number = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


_open = lru_cache(OPEN_FILES)(OpenFile)


def kept_open(path: str | Path) -> OpenFile:
    """A file of this machine, which stays open to be read again, unless it is removed or replaced."""
    file = _open(path)
    if os.fstat(file.number).st_nlink:
        return file
    close_removed()
    return _open(path)


def close_removed() -> None:
    """Close files that are kept open, because some are gone, and take up the disk as long as they are open."""
    _open.cache_clear()


def in_a_thread(read: Callable[..., bytes], *arguments: Any) -> Future[bytes]:
    """Read from a disk in one of the threads that this process has for it."""
    return _readers(os.getpid()).submit(read, *arguments)


@cache
def _readers(process: int) -> ThreadPoolExecutor:
    """The threads of the process with this id, since a fork has none."""
    return ThreadPoolExecutor(READING_THREADS, thread_name_prefix="read")


class Folder(Storage):
    """A folder of this machine."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.path = unquote(urlsplit(root).path) if root.startswith("file://") else root

    def __reduce__(self) -> Any:
        return Folder, (self.root,)

    def read(self, name: str, start: int, end: int) -> bytes:
        return self._named(name, lambda path: read_range(kept_open(path), start, end))

    def begin(self, name: str, start: int, end: int) -> Future[bytes]:
        return in_a_thread(self.read, name, start, end)

    def write(self, name: str, path: Path) -> None:
        target = Path(self.path, name)
        # Not named by the process: those of two containers on one disk may have the same number.
        partial = target.with_name(f".{target.name}.{uuid4().hex}.partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(path, partial)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        return os.path.isfile(os.path.join(self.path, name))

    def size(self, name: str) -> int:
        return self._named(name, os.path.getsize)

    def _named(self, name: str, action: Callable[[str], T]) -> T:
        path = os.path.join(self.path, name)
        try:
            return action(path)
        except FileNotFoundError:
            fix = "set data.root to the folder that holds it"
            raise MissingError(f"{path} does not exist; {fix}") from None


def read_range(file: OpenFile, start: int, end: int) -> bytes:
    """The bytes of an open file from `start` up to `end`, exactly so many."""
    read = os.pread(file.number, end - start, start)
    while len(read) < end - start:  # a signal, or more than 2 GiB
        more = os.pread(file.number, end - start - len(read), start + len(read))
        if not more:
            raise too_short(str(file.path), os.fstat(file.number).st_size, end)
        read += more
    return read


def too_short(where: str, size: int, end: int) -> StorageError:
    """What is said of a file that ends before the range that was asked for."""
    return StorageError(
        f"{where} has {size:,} bytes, too few to read up to {end:,}; {CUT}", may_pass=False
    )
