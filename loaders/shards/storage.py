"""Files under one root, a folder, a web server or a bucket, through obstore, which retries requests
that fail; and copies of remote shards."""

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import LocalStore, from_url

from conf.errors import UserError
from loaders.columns import one_process_at_a_time
from loaders.index import ReadError

AUTHORIZATION = "HTTP_AUTHORIZATION"
"""Environment variable with the header that web servers get."""

CREDENTIALS = {
    "http": AUTHORIZATION,
    "https": AUTHORIZATION,
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true",
}
"""What to set, by scheme."""

COPIES_AT_ONCE = 8
"""Number of shards that a process copies in advance at once."""

# What no retry can solve: an answer of 4xx but for time-outs and too many requests, a wrong
# address, or no credentials, for which obstore asks the clouds' own servers at last.
DENIED = (
    r"status code: 4(?!08|29)|builder error|configured region|169\.254\.169\.254|metadata\.google"
)


class StorageError(Exception):
    """A storage cannot be used now; the run may succeed later.

    It is not an OSError, which would mean that one file is bad.
    """


class Storage:
    """Files under a root, for any number of threads and processes.

    Names are relative to the root, with `/` between their parts. All methods raise `StorageError`
    if the storage fails for `retry_s`, and `UserError` if it has no such file or denies it.

    Args:
        root: a folder, or an `http://`, `https://`, `s3://` or `gs://` address. Credentials are in
            the environment.
        retry_s: seconds for which a failing request is retried.
        stall_s: seconds without a byte after which an attempt fails and the next one begins.
    """

    def __init__(self, root: str, retry_s: float, stall_s: float = 10.0) -> None:
        self.root, self.retry_s, self.stall_s = root, retry_s, stall_s
        self.scheme = root.partition("://")[0] if "://" in root else ""
        if self.scheme not in ("", *CREDENTIALS):
            raise UserError(
                f"{self.scheme}:// is not supported; use one of {', '.join(CREDENTIALS)}"
            )
        if self.scheme and ("@" in root or "?" in root):
            raise UserError(
                f"data.root={self.scheme}://*** holds a user, password or query, which runs would "
                f"store; leave them out, and set {CREDENTIALS[self.scheme]}"
            )

    def place_of(self, name: str) -> str:
        """Return the path or address of a file."""
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes:
        with self._errors_of(name):
            return bytes(obstore.get(self._store, name).bytes())

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to a local path; raise OSError if the copy cannot be written."""
        with path.open("wb") as file, self._errors_of(name):
            for chunk in obstore.get(self._store, name).stream():
                file.write(chunk)

    def write(self, name: str, content: bytes | Path) -> None:
        """Store bytes or a copy of a local file, whole or not at all; an older file is replaced."""
        in_parts = False if self.scheme.startswith("http") else None
        with self._errors_of(name):
            obstore.put(self._store, name, content, use_multipart=in_parts)

    def exists(self, name: str) -> bool:
        with self._errors_of(name):
            try:
                obstore.head(self._store, name)
            except FileNotFoundError:
                return False
        return True

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Turn obstore's errors, which fill pages, into those of this file."""
        try:
            yield
        except FileNotFoundError:
            raise UserError(
                f"{self.place_of(name)} is missing; check data.root, or pack the data"
            ) from None
        except (exceptions.BaseError, ValueError, TimeoutError) as error:
            text = str(error)
            status = re.search(r"status code: (\d{3}[\w -]*\w)", text)
            reason = status[1] if status else text.partition("\n")[0].rpartition(" - ")[2]
            what = f"{self.place_of(name)}: {reason}"
            if re.search(DENIED, text):
                variables = CREDENTIALS.get(self.scheme, "its permissions")
                raise UserError(f"{what}; check data.root, or set {variables}") from None
            raise StorageError(
                f"{what}, for data.retry_s={self.retry_s:g}; check that the server answers, or "
                "increase data.retry_s"
            ) from None

    @cached_property
    def _store(self) -> Any:
        if not self.scheme:
            Path(self.root).mkdir(parents=True, exist_ok=True)  # its error names the path
            return LocalStore(self.root)
        options: Any = {
            "allow_http": self.scheme != "https",  # for s3 and gs, the environment decides
            "read_timeout": timedelta(seconds=self.stall_s),
            "timeout": timedelta(days=1),  # of a file whose bytes keep arriving
        }
        if self.scheme.startswith("http") and AUTHORIZATION in os.environ:
            options["default_headers"] = {"authorization": os.environ[AUTHORIZATION]}
        retry: Any = {"max_retries": 1 << 30, "retry_timeout": timedelta(seconds=self.retry_s)}
        return from_url(self.root.rstrip("/"), client_options=options, retry_config=retry)


class Copies:
    """The tar files of a split on this machine, by number: where they lie, or copies of remote ones
    in the folder `cache`. One process of the machine copies a file, the others wait for it."""

    def __init__(self, storage: Storage, split: str, cache: Path) -> None:
        self.storage, self.split, self.cache = storage, split, cache
        self.is_remote = bool(storage.scheme)
        self.folder = Path(cache if self.is_remote else storage.root, split)
        self._pool = ThreadPoolExecutor(COPIES_AT_ONCE, "copy")
        self._running: dict[int, Future[None]] = {}

    def __reduce__(self) -> Any:
        return Copies, (self.storage, self.split, self.cache)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.tar"

    def read(self, number: int, start: int, length: int) -> bytes:
        """Read bytes of a tar file, which is copied first if it is not here."""
        self._copy(number)
        path = self.path(number)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                return file.read(length)
        except OSError as error:
            raise ReadError(
                f"{path} cannot be read ({error.strerror}); bring it back, or pack the data again"
            ) from error

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Begin to copy files, the first one first, until there are `COPIES_AT_ONCE`: a queue would
        delay the end of the process. What fails is tried again when it is needed."""
        self._running = {n: future for n, future in self._running.items() if not future.done()}
        for number in numbers:
            is_new = number not in self._running and not self.path(number).exists()
            if is_new and len(self._running) < COPIES_AT_ONCE:
                self._running[number] = self._pool.submit(self._copy, number)

    def keep(self, numbers: Sequence[int]) -> None:
        """Remove all other copies."""
        kept = {self.path(number) for number in numbers}
        for path in {*self.folder.glob("*.tar")} - kept:
            path.unlink(missing_ok=True)

    def _copy(self, number: int) -> None:
        path = self.path(number)
        partial = path.with_suffix(".partial")
        if not self.is_remote or path.exists():
            return
        try:
            with one_process_at_a_time(path):
                if not path.exists():
                    self.storage.fetch(f"{self.split}/{path.name}", partial)
                    partial.rename(path)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror or error}); free some space, use "
                "another data.cache_dir, or a smaller data.shuffle_window"
            ) from error
