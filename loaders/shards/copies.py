"""The tar files of a split on this machine: where they lie, or copies of remote ones."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conf.errors import UserError
from loaders.headers import one_process_at_a_time
from loaders.index import ReadError
from loaders.shards.storage import Storage

AT_ONCE = 8
"""Number of shards that a process copies at once."""


class Copies:
    """Tar files by number. One process of the machine copies a remote one, the others wait for it.

    Args:
        storage: storage of the shards.
        split: name of the split.
        cache: folder of copies.
    """

    def __init__(self, storage: Storage, split: str, cache: Path) -> None:
        self.storage, self.split, self.cache = storage, split, cache
        self.is_remote = bool(storage.scheme)
        self.folder = Path(cache if self.is_remote else storage.root, split)
        self._pool = ThreadPoolExecutor(AT_ONCE, "copy")
        self._running: dict[int, Future[None]] = {}
        self._renewed: set[int] = set()

    def __reduce__(self) -> Any:
        return Copies, (self.storage, self.split, self.cache)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.tar"

    def read(self, number: int, start: int, length: int) -> bytes:
        """Read bytes of a tar file, from a new copy if another process has removed it."""
        self.fetch([number])
        path = self.path(number)
        try:
            with open(path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), length, start)
        except OSError as error:
            raise ReadError(
                f"{path} cannot be read ({error.strerror}); bring it back, or pack the data again"
            ) from error

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of remote files without a copy."""
        return [n for n in numbers if self.is_remote and not self.path(n).exists()]

    def fetch(self, numbers: Sequence[int]) -> None:
        """Wait until files can be read."""
        if missing := self.missing(numbers):
            list(self._pool.map(self._copy, missing))

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Begin to copy files, the first one first, until `AT_ONCE` are being copied: a queue would
        delay the end of the process. What fails is tried again when it is needed."""
        self._running = {n: future for n, future in self._running.items() if not future.done()}
        for number in self.missing(numbers):
            if number not in self._running and len(self._running) < AT_ONCE:
                self._running[number] = self._pool.submit(self._copy, number)

    def keep(self, numbers: Sequence[int]) -> None:
        """Remove all other copies."""
        kept = {self.path(number) for number in numbers}
        for path in self.folder.glob("*.tar") if self.is_remote else ():
            if path not in kept:
                path.unlink(missing_ok=True)

    def renew(self, number: int) -> None:
        """Remove a copy in which damaged bytes were found, once: then it is the server's."""
        if self.is_remote and number not in self._renewed:
            self._renewed.add(number)
            self.path(number).unlink(missing_ok=True)

    def _copy(self, number: int) -> None:
        path = self.path(number)
        partial = path.with_name(f"{path.name}.partial")
        try:
            with one_process_at_a_time(path):
                if not path.exists():
                    self.storage.fetch(f"{self.split}/{path.name}", partial)
                    partial.rename(path)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror or error}); free some space, or use "
                "another data.cache_dir"
            ) from error
