"""Copies of remote shards and their index on this machine's disk, shared by its processes."""

import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path

from filelock import FileLock

from conf.credentials import without_credentials
from conf.errors import UserError, counted
from conf.files import checksum
from conf.schema import DataConfig
from loaders.index import one_process_at_a_time, replaced_folder
from loaders.shards.files import Shards, shard_name
from loaders.shards.storage import Storage

PARTIAL, LOCK = ".partial", ".lock"
"""File name endings of copies that are not complete, and of locks."""

SHARDS_AT_ONCE = 8
"""Number of shards that a process copies at once."""

TAIL_BYTES = 16 << 10
"""Maximum bytes after the last image of a shard: its labels, and the end of the tar file."""


def copy_columns(storage: Storage, columns: dict[str, object], folder: Path) -> None:
    """Copy the files of the index, by name their size and checksum, into a folder, unless it
    exists."""
    with one_process_at_a_time(folder):
        if folder.is_dir():
            return
        with replaced_folder(folder) as unfinished:
            for name, facts in columns.items():
                path = unfinished / name
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise UserError(
                        f"{without_credentials(storage.root)}: {name} would be written outside of "
                        f"{folder}; use shards of those you trust"
                    )
                path.parent.mkdir(parents=True, exist_ok=True)
                storage.fetch(name, path)
                if {"size": path.stat().st_size, "crc32": checksum(path)} != facts:
                    raise UserError(
                        f"{without_credentials(storage.root)}: {name} is not the file that was "
                        "packed with the shards; restore it, or pack again into another place"
                    )


def room_for_copies(shard_sizes: list[int], data: DataConfig, folder: Path) -> int:
    """Return the maximum number of bytes of the copies in a folder.

    Raises:
        UserError: the shards that are needed at a time do not fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = sorted(size + TAIL_BYTES for size in shard_sizes)
    fix = "data.shuffle=window, which needs few shards at a time"
    if data.shuffle == "window":
        # The current window, the next one, and shards that batches of the previous one still use.
        sizes = sizes[-(2 * data.shuffle_window + 2) :]
        fix = "a smaller data.shuffle_window"
    needed = sum(sizes)
    free = shutil.disk_usage(folder).free + sum(num_bytes for _, num_bytes, _ in _copies_in(folder))
    limits = {f"data.cache_dir={data.cache_dir} has {free / 1e9:.3g} GB of free space": float(free)}
    if data.cache_gb is not None:
        limits[f"data.cache_gb={data.cache_gb:g}"] = 1e9 * data.cache_gb
    for limit, num_bytes in limits.items():
        if num_bytes < needed:
            raise UserError(
                f"{limit}, but copies of {counted(len(sizes), 'shard')} need "
                f"{needed / 1e9:.3g} GB; "
                f"increase it, or use {fix}"
            )
    return needed if data.cache_gb is None else int(1e9 * data.cache_gb)


class Copies(Shards):
    """The shards of a split as files of this machine; each is copied whole when it is first needed.

    One process of the machine copies a shard, the others wait for it. When the copies exceed
    `max_bytes`, the least recently used ones are removed.

    Args:
        storage, fingerprint, columns: as of `Shards`; names of copies begin with the fingerprint.
        folder: folder of the copies.
        max_bytes: maximum size of all copies in `folder`, including those of other data sets.
    """

    def __init__(
        self, storage: Storage, fingerprint: str, folder: Path, max_bytes: int, columns: Path
    ) -> None:
        super().__init__(storage, fingerprint, columns)
        self.folder, self.max_bytes = folder, max_bytes
        self._pool = ThreadPoolExecutor(SHARDS_AT_ONCE, "fetch")
        self._running: dict[int, Future[None]] = {}
        self._replaced: set[int] = set()

    def path(self, number: int) -> Path:
        return self.folder / f"{self.fingerprint}-{self.columns.name}-{number:06d}.tar"

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Start to copy shards, the first one first, up to `SHARDS_AT_ONCE`."""
        # Failed copies are dropped, too: when their shard is needed, the server may be back.
        self._running = {n: future for n, future in self._running.items() if not future.done()}
        for number in numbers:
            if len(self._running) == SHARDS_AT_ONCE:
                break  # a queue would delay the end of the process
            if number not in self._running and not self._touch(number):
                self._running[number] = self._pool.submit(self._fetch, number)

    def fetch(self, numbers: Iterable[int]) -> None:
        """Wait until there are copies of shards.

        Raises:
            StorageError, UserError: one cannot be copied.
        """
        missing = [number for number in numbers if not self._touch(number)]
        for _ in self._pool.map(self._fetch, missing):
            pass

    def open(self, number: int) -> FileIO:
        """Open a copy, a new one if it was removed."""
        try:
            return super().open(number)
        except FileNotFoundError:
            self.fetch([number])
            return super().open(number)

    def drop(self, number: int) -> None:
        if number not in self._replaced:  # else the server's is damaged, too
            self._replaced.add(number)
            self.path(number).unlink(missing_ok=True)

    def _touch(self, number: int) -> bool:
        """Mark a copy as used; return False if there is none."""
        with suppress(FileNotFoundError, PermissionError):  # another user's
            os.utime(self.path(number))
        return self.path(number).exists()

    def _fetch(self, number: int) -> None:
        """Copy a shard, unless another process has copied it meanwhile."""
        path, name = self.path(number), shard_name(self.columns.name, number)
        partial = path.with_name(path.name + PARTIAL)
        try:
            with FileLock(f"{path}{LOCK}"):
                if not path.exists():
                    self._make_room(self.sizes[number])
                    self.storage.fetch(name, partial)
                    partial.rename(path)
        except OSError as error:
            raise UserError(
                f"data.cache_dir={self.folder.parent}: {name} cannot be copied "
                f"({error.strerror or error}); free some space, or use another data.cache_dir"
            ) from error

    def _make_room(self, size: int) -> None:
        """Remove the least recently used copies until one of this size fits."""
        with FileLock(self.folder / f"room{LOCK}"):
            copies = sorted(_copies_in(self.folder))
            room = self.max_bytes - size
            for _, num_bytes, path in copies:
                room -= max(num_bytes, size) if path.suffix == PARTIAL else num_bytes
            for _, num_bytes, path in copies:
                if room < 0:
                    path.unlink(missing_ok=True)
                    room += num_bytes


def _copies_in(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield when each copy was used last (in ns), its bytes and its path."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it
            if path.suffix != LOCK:
                yield path.stat().st_mtime_ns, path.stat().st_size, path
