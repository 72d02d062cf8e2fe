"""A local copy of the files of a bucket, of bounded size, that the ranks, workers and runs of a machine share.

Nothing but the files themselves and locks of the kernel says who does what, so that a process that is killed
leaves nothing behind but a partial file, which the next one that needs room removes.
"""

import asyncio
import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loaders.bucket import TRY_S, Bucket, submit
from loaders.storage import (
    OpenFile,
    Storage,
    StorageError,
    close_removed,
    in_a_thread,
    kept_open,
    read_range,
)

log = logging.getLogger(__name__)

PARTIAL, KEY_LENGTH = ".partial", 32
"""How the names of files that arrive end, and how long those of whole copies are."""

POLL_S = 0.05
"""Between two looks at a file that another process fetches."""


class CachedBucket(Storage):
    """A bucket whose files are fetched whole when a range of them is first read.

    Args:
        bucket: what is read.
        folder: where the copies lie; any number of processes may use it at once.
        most_bytes: that the copies in it may have together. Of processes with different bounds that live at
            the same time, the largest holds; the least recently used copy goes first.
    """

    def __init__(self, bucket: Bucket, folder: Path, most_bytes: int) -> None:
        self.root = bucket.root
        self.bucket = bucket
        self.folder = folder.absolute()
        self.most_bytes = most_bytes
        self._copies: dict[str, Path] = {}
        self._sizes: dict[str, int] = {}
        self._too_large: set[str] = set()
        self._arriving: dict[str, asyncio.Task[OpenFile | None]] = {}
        self._bound: OpenFile | None = None
        """Its lock says that a process with this bound lives."""
        self._is_off = False

    def __reduce__(self) -> Any:
        return CachedBucket, (self.bucket, self.folder, self.most_bytes)

    @property
    def origin(self) -> Storage:
        return self.bucket

    def read(self, name: str, start: int, end: int) -> bytes:
        file = _use(self._copies.get(name))
        return read_range(file, start, end) if file else super().read(name, start, end)

    def begin(self, name: str, start: int, end: int) -> Future[bytes]:
        file = _use(self._copies.get(name))
        if file:
            return in_a_thread(read_range, file, start, end)
        if self._is_off or name in self._too_large:
            return self.bucket.begin(name, start, end)
        return submit(self._fetch(name, start, end))

    def write(self, name: str, path: Path) -> None:
        self.bucket.write(name, path)
        self._copies.pop(name, None)
        self._sizes.pop(name, None)
        self._too_large.discard(name)

    def exists(self, name: str) -> bool:
        return self.bucket.exists(name)

    def size(self, name: str) -> int:
        return self.bucket.size(name)

    # As coroutines of the loop

    async def _fetch(self, name: str, start: int, end: int) -> bytes:
        if name not in self._arriving:
            self._arriving[name] = asyncio.create_task(self._copy(name))
            self._arriving[name].add_done_callback(lambda _: self._arriving.pop(name))
        # Others wait for it, too, when this read is cancelled.
        file = await asyncio.shield(self._arriving[name])
        if file is None:
            return await self.bucket.fetch(name, start, end)
        return await asyncio.to_thread(read_range, file, start, end)

    async def _copy(self, name: str) -> OpenFile | None:
        """The copy of a file, which is fetched unless it is there; None where it cannot be."""
        if name not in self._sizes:
            self._sizes[name] = await self.bucket.head(name)
        size = self._sizes[name]
        if size > self.most_bytes:
            if not self._too_large:
                self._say(f"{self.bucket.address(name)} alone has {size / 1e9:.3g} GB")
            self._too_large.add(name)
            return None
        copy = self.folder / self._key(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while not (file := _use(copy)):
                if not await self._try_to_fetch(name, size, copy):
                    return None
        except StorageError:
            raise
        except OSError as error:
            self._is_off = True
            self._say(f"data.cache_dir={self.folder.parent}: {error.strerror}")
            return None
        self._copies[name] = copy
        close_removed()  # copies that made room for this one, or for one of another process
        return file

    async def _try_to_fetch(self, name: str, size: int, copy: Path) -> bool:
        """Fetch a file, or wait a moment for the process that does; False if it cannot be copied now."""
        partial = copy.with_name(copy.name + PARTIAL)
        with _locked(partial, os.O_CREAT) as file:
            if file is None:
                await asyncio.sleep(POLL_S)
                return not _has_stalled(partial)
            if copy.exists():  # another process was faster
                return True
            if not await asyncio.to_thread(self._make_room, file, size):
                return False

            async def keep(start: int, part: bytes) -> None:
                if await asyncio.to_thread(lambda: os.pwrite(file.number, part, start)) < len(part):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            await self.bucket.fetch_parts(name, 0, size, keep)
            await asyncio.to_thread(lambda: os.fdatasync(file.number))
            os.rename(partial, copy)
            return True

    def _key(self, name: str) -> str:
        """Of one state of a file: another one is another copy."""
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        state = f"{endpoint}\n{self.bucket.address(name)}\n{self.bucket.states[name]}"
        return hashlib.sha256(state.encode()).hexdigest()[:KEY_LENGTH]

    def _say(self, why: str) -> None:
        log.warning("data.cache_gb=%g: %s; read without a copy", self.most_bytes / 1e9, why)

    # Room

    def _make_room(self, partial: OpenFile, size: int) -> bool:
        """Give a partial file its size, and remove what is in its way; False if others that arrive are.

        Raises:
            OSError: the disk is full.
        """
        with open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            room = self._largest_bound() - size
            copies, own = [], os.fstat(partial.number).st_ino
            for entry in os.scandir(self.folder):
                with suppress(FileNotFoundError, PermissionError):
                    stat = entry.stat()
                    if entry.name.endswith(PARTIAL) and stat.st_ino != own:
                        with _locked(Path(entry.path)) as left_over:  # by a process that was killed
                            room -= 0 if left_over else stat.st_size
                    elif len(entry.name) == KEY_LENGTH:
                        copies.append((stat.st_mtime_ns, entry.path, stat.st_size))
                        room -= stat.st_size
            for _, path, freed in sorted(copies):
                if room >= 0:
                    break
                os.unlink(path)
                room += freed
            if room >= 0 and size:
                os.ftruncate(partial.number, size)
                os.posix_fallocate(partial.number, 0, size)
            return room >= 0

    def _largest_bound(self) -> int:
        """Of the processes that live, this one among them."""
        bounds = self.folder / "bounds"
        bounds.mkdir(exist_ok=True)
        if self._bound is None:
            self._bound = OpenFile(bounds / str(self.most_bytes), os.O_CREAT | os.O_RDWR)
            fcntl.flock(self._bound.number, fcntl.LOCK_SH)
        of_others = [path for path in bounds.iterdir() if path.name.isdigit()]
        held = [path for path in of_others if not _try_lock(OpenFile(path, os.O_RDWR))]
        return max([self.most_bytes, *(int(path.name) for path in held)])


@contextmanager
def _locked(partial: Path, flags: int = 0) -> Iterator[OpenFile | None]:
    """A partial file that this process alone writes; None if another one does. What is left of it in the
    end, because it did not become whole, is removed.
    """
    file = OpenFile(partial, os.O_RDWR | flags)
    if not (_try_lock(file) and _is_at(file, partial)):
        yield None
        return
    try:
        yield file
    finally:
        if _is_at(file, partial):
            os.unlink(partial)
        fcntl.flock(file.number, fcntl.LOCK_UN)  # a thread may still have it


def _try_lock(file: OpenFile) -> bool:
    try:
        fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: OpenFile, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.number))
    except FileNotFoundError:
        return False


def _has_stalled(partial: Path) -> bool:
    """Whether nothing has arrived for longer than a request may take."""
    with suppress(FileNotFoundError):
        return time.time() - os.stat(partial).st_mtime > TRY_S
    return False


def _use(copy: Path | None) -> OpenFile | None:
    """A copy, opened and noted as used now; None if it is not there."""
    if copy is None:
        return None
    try:
        file = kept_open(copy)
    except FileNotFoundError:
        return None
    with suppress(PermissionError):  # that of another user
        os.utime(file.number)
    return file
