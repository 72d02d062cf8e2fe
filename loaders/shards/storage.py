"""Files under one root, a folder, a web server or a bucket, through obstore, which retries requests
that fail."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from conf.errors import UserError

try:
    import obstore
    from obstore import exceptions
    from obstore.store import LocalStore, from_url
except ModuleNotFoundError:
    raise UserError("shards need the package obstore; pip install obstore") from None

AUTHORIZATION = "HTTP_AUTHORIZATION"
"""Environment variable with the header that web servers get, such as `Bearer TOKEN`."""
WITH_LOGIN = f"set {AUTHORIZATION} to 'Bearer TOKEN', or to 'Basic' and the base64 of USER:PASSWORD"
CREDENTIALS = {
    "http": WITH_LOGIN,
    "https": WITH_LOGIN,
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true: a public bucket)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS (GOOGLE_SKIP_SIGNATURE=true: a public bucket)",
}
"""How to set credentials, by scheme."""

STATUS = r"status code: (\d{3}[\w -]*\w)"
NO_CREDENTIALS = r"status code: 40[13]|169\.254\.169\.254|metadata\.google"
"""The addresses are of the clouds' servers that obstore asks if it has found none elsewhere."""
FIXES = {
    "configured region": "set AWS_REGION to the region of the bucket",
    r"status code: 4(?!08|29)|builder error": "check data.root",
}
"""What an error's text says that retries cannot solve -> what the user can do."""


class StorageError(Exception):
    """A storage cannot be used now; the run may succeed later.

    It is not an OSError, which would mean that one file is bad.
    """


class MissingError(UserError):
    """There is no file of this name."""


class Storage:
    """Files under a root, for any number of threads and processes.

    Names are relative to the root, with `/` between their parts. All methods raise `StorageError`
    if the storage fails for `retry_s`, and `UserError` if it denies the request.

    Args:
        root: a folder, or an `http://`, `https://`, `s3://` or `gs://` address. Credentials are in
            the environment.
        retry_s: seconds for which a failing request is retried.
        stall_s: seconds without a byte after which an attempt fails and the next one begins.

    Raises:
        UserError: `root` has another scheme, or holds credentials.
    """

    def __init__(self, root: str, retry_s: float, stall_s: float = 10.0) -> None:
        self.root, self.retry_s, self.stall_s = root, retry_s, stall_s
        self.scheme = root.partition("://")[0] if "://" in root else ""
        if self.scheme and self.scheme not in CREDENTIALS:
            raise UserError(
                f"{self.scheme}:// is not supported; set data.root to a folder or one of "
                + ", ".join(f"{scheme}://" for scheme in CREDENTIALS)
            )
        if self.scheme and ("@" in root or "?" in root):
            raise UserError(
                f"data.root={self.scheme}://*** holds a user, password or query, which runs would "
                f"store; leave them out, and {CREDENTIALS[self.scheme]}"
            )

    def place_of(self, name: str) -> str:
        """Return the path or address of a file."""
        return f"{self.root.rstrip('/')}/{name}"

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `MissingError` if there is none."""
        with self._errors_of(name):
            return bytes(obstore.get(self._store, name).bytes())

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to a local path. Raises `MissingError` if there is none, and OSError if the
        copy cannot be written."""
        with path.open("wb") as file, self._errors_of(name):
            for chunk in obstore.get(self._store, name).stream():
                file.write(chunk)

    def write(self, name: str, content: bytes | Path) -> None:
        """Store bytes or a copy of a local file, whole or not at all; an older file is replaced."""
        in_parts = False if self.scheme.startswith("http") else None
        with self._errors_of(name):
            obstore.put(self._store, name, content, use_multipart=in_parts)

    def exists(self, name: str) -> bool:
        """Return True if there is a file of this name."""
        try:
            with self._errors_of(name):
                obstore.head(self._store, name)
        except MissingError:
            return False
        return True

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Turn obstore's errors into those of this file."""
        try:
            yield
        except (FileNotFoundError, exceptions.BaseError, ValueError, TimeoutError) as error:
            text = str(error)
            what = f"{self.place_of(name)}: {_summary(text)}"
            if isinstance(error, FileNotFoundError):
                raise MissingError(f"{what}; set data.root to the place that holds it") from None
            fixes = {NO_CREDENTIALS: CREDENTIALS.get(self.scheme, "")} | FIXES
            for sign, fix in fixes.items():
                if re.search(sign, text):
                    raise UserError(f"{what}; {fix}") from None
            raise StorageError(
                f"{what}, for data.retry_s={self.retry_s:g}; check that the server answers, or "
                "increase data.retry_s"
            ) from None

    @cached_property
    def _store(self) -> Any:
        if not self.scheme:
            Path(self.root).mkdir(parents=True, exist_ok=True)
            return LocalStore(self.root)
        options: Any = {}
        if self.scheme.startswith("http") and AUTHORIZATION in os.environ:
            options["default_headers"] = {"authorization": os.environ[AUTHORIZATION]}
        return from_url(
            self.root.rstrip("/"),
            client_options={
                **options,
                "allow_http": self.scheme != "https",  # for s3 and gs, the environment decides
                "read_timeout": timedelta(seconds=self.stall_s),
                "timeout": timedelta(days=1),  # of a file whose bytes keep arriving
            },
            retry_config={
                "max_retries": 1 << 30,
                "retry_timeout": timedelta(seconds=self.retry_s),
            },
        )


def _summary(text: str) -> str:
    """Return the cause of an error in a few words."""
    status, code = re.search(STATUS, text), re.search(r"<Code>(\w+)</Code>", text)
    if status:
        return status[1] + (f" ({code[1]})" if code else "")
    return text.partition("\n")[0].rpartition(" - ")[2]
