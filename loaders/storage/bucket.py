"""Storage on a web server or in a bucket, through obstore, which retries requests that fail."""

import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from conf.credentials import without_credentials
from conf.errors import UserError
from loaders.storage.base import MissingError, Storage, StorageError

try:
    import obstore
    from obstore import exceptions
    from obstore.store import from_url
except ModuleNotFoundError:
    raise UserError(
        "http(s)://, s3:// and gs:// need the package obstore; pip install obstore"
    ) from None

LONGEST_S = 24 * 3600
"""Time-out in seconds of a file whose bytes keep arriving."""

CHUNK_BYTES = 4 << 20

WITH_LOGIN = "put USER:PASSWORD@ before the host in data.root, or add its query; runs store neither"
CREDENTIALS = {
    "http": WITH_LOGIN,
    "https": WITH_LOGIN,
    "s3": "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (AWS_SKIP_SIGNATURE=true: a public bucket)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS (GOOGLE_SKIP_SIGNATURE=true: a public bucket)",
}
"""How to set credentials, by scheme."""

STATUS = r"status code: (\d{3}[\w -]*\w)"
METADATA = ("169.254.169.254", "metadata.google")
"""Servers of clouds that obstore asks for credentials when it has found none elsewhere."""


class Bucket(Storage):
    """A web server or bucket.

    Args:
        root: such as `s3://bucket/prefix`; obstore takes its credentials from the environment.
        retry_s: seconds for which a failing request is retried.
        stall_s: seconds without a byte after which an attempt fails.

    Raises:
        UserError: `root` has another scheme.
    """

    def __init__(self, root: str, retry_s: float, stall_s: float) -> None:
        super().__init__(root)
        self.retry_s, self.stall_s = retry_s, stall_s
        self.scheme = root.partition("://")[0]
        if self.scheme not in CREDENTIALS:
            raise UserError(
                f"{without_credentials(root)}: {self.scheme}:// is not supported; use a folder or "
                "one of " + ", ".join(f"{scheme}://" for scheme in CREDENTIALS)
            )

    def read(self, name: str) -> bytes:
        with self._errors_of(name):
            return bytes(obstore.get(self._store, name).bytes())

    def fetch(self, name: str, path: Path) -> None:
        with path.open("wb") as file, self._errors_of(name):
            for chunk in obstore.get(self._store, name).stream(min_chunk_size=CHUNK_BYTES):
                file.write(chunk)

    def write(self, name: str, content: bytes | Path) -> None:
        in_parts = None if self.scheme in ("s3", "gs") else False
        with self._errors_of(name):
            obstore.put(self._store, name, content, use_multipart=in_parts)

    def exists(self, name: str) -> bool:
        try:
            with self._errors_of(name):
                obstore.head(self._store, name)
        except MissingError:
            return False
        return True

    @contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Turn obstore's errors into those of `loaders.storage`, without credentials."""
        address = f"{without_credentials(self.root).rstrip('/')}/{name}"
        try:
            yield
        except FileNotFoundError as error:
            raise MissingError(
                f"{address}: {_summary(error)}; set data.root to the place that holds it"
            ) from None
        except (exceptions.BaseError, ValueError, TimeoutError) as error:
            if fix := self._fix(error):
                raise UserError(f"{address}: {_summary(error)}; {fix}") from None
            raise StorageError(
                f"{address}: {_summary(error)}, for data.retry_s={self.retry_s:g}; check that the "
                "server answers, or increase data.retry_s"
            ) from None

    def _fix(self, error: Exception) -> str:
        """Return advice for an error that retries cannot solve; empty for a temporary one."""
        text, status = str(error), re.search(STATUS, str(error))
        code = status[1][:3] if status else ""
        if code in ("401", "403") or any(server in text for server in METADATA):
            return CREDENTIALS[self.scheme]
        if self.scheme == "s3" and "configured region" in text:
            return "set AWS_REGION to the region of the bucket"
        if (code.startswith("4") and code not in ("408", "429")) or "builder error" in text:
            return "check data.root"
        return ""

    @cached_property
    def _store(self) -> Any:
        address = urlsplit(self.root)
        user, at, host = address.netloc.rpartition("@")
        bare = address._replace(netloc=host, path=address.path.rstrip("/")).geturl()
        basic = b64encode(unquote(user).encode()).decode()
        return from_url(
            bare,
            client_options={
                "allow_http": self.scheme != "https",  # for s3 and gs, the environment decides
                **({"default_headers": {"authorization": f"Basic {basic}"}} if at else {}),
                "read_timeout": timedelta(seconds=self.stall_s),
                "timeout": timedelta(seconds=LONGEST_S),
            },
            retry_config={
                "max_retries": 1 << 30,
                "retry_timeout": timedelta(seconds=self.retry_s),
            },
        )


def _summary(error: Exception) -> str:
    """Return the cause of an error in a few words, without credentials."""
    text = str(error)
    status, code = re.search(STATUS, text), re.search(r"<Code>(\w+)</Code>", text)
    if status:
        return status[1] + (f" ({code[1]})" if code else "")
    return without_credentials(text.partition("\n")[0]).rpartition(" - ")[2]
