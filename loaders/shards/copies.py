"""Copies of remote shards and their index on this machine's disk, shared by its processes."""

import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from conf.credentials import without_credentials
from conf.errors import UserError
from conf.files import checksum
from conf.schema import DataConfig
from loaders.index import one_process_at_a_time, replaced_folder
from loaders.shards.files import ShardFiles
from loaders.storage import Storage, StorageError

PARTIAL, LOCK = ".partial", ".lock"
"""File name endings of copies that are not complete, and of locks."""

SHARDS_AT_ONCE = 8
"""Number of shards that a process copies at once."""

TAIL_BYTES = 16 << 10
"""Maximum bytes after the last image of a shard: its labels, and the end of the tar file."""


def copy_columns(storage: Storage, columns: dict[str, dict[str, int]], folder: Path) -> None:
    """Copy the files of the index into a folder, unless it exists."""
    with one_process_at_a_time(folder):
        if folder.is_dir():
            return
        with replaced_folder(folder) as unfinished:
            for name, facts in columns.items():
                path = unfinished / name
                path.parent.mkdir(parents=True, exist_ok=True)
                storage.fetch(name, path)
                if {"size": path.stat().st_size, "crc32": checksum(path)} != facts:
                    raise UserError(
                        f"{without_credentials(storage.root)}: {name} is not the file that was "
                        "packed with the shards; restore it, or pack again into another place"
                    )


def room_for_copies(sizes: np.ndarray, data: DataConfig, folder: Path) -> int:
    """Return the maximum number of bytes of the copies in a folder, for shards of (S,) `sizes`.

    Raises:
        UserError: the shards that are needed at a time do not fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = np.sort(sizes.astype(float) + TAIL_BYTES)
    if data.shuffle == "window":
        # The current window, the next one, and shards that batches of the previous one still use.
        sizes = sizes[-(2 * data.shuffle_window + 2) :]
        fix = "use a smaller data.shuffle_window"
    else:
        fix = "use data.shuffle=window, which needs few shards at a time"
    needed = sizes.sum()
    found = f"copies of {len(sizes):,} shards need {needed / 1e9:.3g} GB"
    if data.cache_gb is not None and 1e9 * data.cache_gb < needed:
        raise UserError(f"data.cache_gb={data.cache_gb:g}, but {found}; increase it, or {fix}")
    free = shutil.disk_usage(folder).free + sum(stat.st_size for _, stat in _files_in(folder))
    if free < needed:
        raise UserError(
            f"data.cache_dir={data.cache_dir} has {free / 1e9:.3g} GB of free space, but {found}; "
            f"use another folder, or {fix}"
        )
    return int(needed if data.cache_gb is None else 1e9 * data.cache_gb)


class Copies(ShardFiles):
    """The shards of a split as files of this machine; each is copied whole when it is first needed.

    One process of the machine copies a shard, the others wait for it. When the copies exceed
    `max_bytes`, the least recently used ones are removed.

    Args:
        storage: storage of the shards.
        names: names of the S shards in the storage.
        sizes: (S,) int64: minimum size of each shard in bytes.
        folder: folder of the copies.
        prefix: prefix of the copies' names, unique to the data set.
        max_bytes: maximum size of all copies in `folder`, including those of other data sets.
    """

    def __init__(
        self,
        storage: Storage,
        names: Sequence[str],
        sizes: np.ndarray,
        folder: Path,
        prefix: str,
        max_bytes: int,
    ) -> None:
        super().__init__(folder.absolute(), names)
        self.storage, self.sizes, self.prefix, self.max_bytes = storage, sizes, prefix, max_bytes
        self._running: dict[int, Future[None]] = {}
        self._replaced: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() | {"_running": {}}
        state.pop("_pool", None)
        return state

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="fetch")

    def path(self, number: int) -> Path:
        return self.folder / f"{self.prefix}-{self.names[number].replace('/', '-')}"

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Start to copy shards, the first one first, up to `SHARDS_AT_ONCE`."""
        running = list(self._running.items())  # other threads may change it
        # Failed copies are dropped, too: when their shard is needed, the server may be back.
        self._running = {n: future for n, future in running if not future.done()}
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
        numbers = list(numbers)
        for position, number in enumerate(numbers):
            if not self._touch(number):
                self.prefetch(numbers[position:])
                if future := self._running.get(number):
                    future.result()
                else:  # others are being copied
                    self._fetch(number)

    def reopen(self, number: int, damaged: FileIO) -> FileIO:
        """Open a shard again; the first time, remove its copy and fetch it once more.

        Raises:
            StorageError, UserError: it cannot be copied.
        """
        path = self.path(number)
        with suppress(FileNotFoundError):  # another process or thread has removed it
            is_same = os.path.samestat(path.stat(), os.fstat(damaged.fileno()))
            if is_same and number not in self._replaced:
                path.unlink()
        self._replaced.add(number)
        self._open.pop(number, None)
        return self.open(number)

    def _touch(self, number: int) -> bool:
        """Mark a copy as used; return False if there is none."""
        try:
            os.utime(self.path(number))
        except FileNotFoundError:
            return False
        except PermissionError:  # another user's
            pass
        return True

    def _fetch(self, number: int) -> None:
        """Copy a shard, unless another process has copied it meanwhile."""
        path, name = self.path(number), self.names[number]
        partial = path.with_name(path.name + PARTIAL)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}{LOCK}"):
                if path.exists():
                    return
                self._make_room(int(self.sizes[number]))
                try:
                    self.storage.fetch(name, partial)
                    if (size := partial.stat().st_size) < self.sizes[number]:
                        raise StorageError(
                            f"{name} has {size:,} bytes, but its index needs "
                            f"{self.sizes[number]:,}; pack it again"
                        )
                    partial.rename(path)
                finally:
                    partial.unlink(missing_ok=True)
        except OSError as error:
            free = shutil.disk_usage(self.folder.parent).free
            raise UserError(
                f"data.cache_dir={self.folder.parent}: {name} cannot be copied "
                f"({error.strerror or error}; {free / 1e9:.3g} GB are free); free some space, or "
                "use another data.cache_dir"
            ) from error

    def _make_room(self, size: int) -> None:
        """Remove the least recently used copies until one of this size fits."""
        with FileLock(self.folder / f"room{LOCK}"):
            copies = [(path, stat) for path, stat in _files_in(self.folder) if path.suffix != LOCK]
            room = self.max_bytes - size
            for path, stat in copies:
                room -= max(stat.st_size, size) if path.suffix == PARTIAL else stat.st_size
            for path, stat in sorted(copies, key=lambda copy: copy[1].st_mtime_ns):
                if room < 0:
                    path.unlink(missing_ok=True)
                    room += stat.st_size


def _files_in(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it
            found.append((path, path.stat()))
    return found
