"""The base class of all storages, and their errors."""

from abc import ABC, abstractmethod
from pathlib import Path

from conf.errors import UserError


class StorageError(Exception):
    """A storage cannot be used now; the run may succeed later.

    It is not an OSError, which would mean that one file is bad.
    """


class MissingError(UserError):
    """There is no file of this name."""


class Storage(ABC):
    """Files under a root, for any number of threads and processes.

    Names are relative to the root, with `/` between their parts. All methods raise `StorageError`
    if the storage fails for `data.retry_s`, and `UserError` if it denies the request.
    """

    root: str
    """As given, with credentials; print `without_credentials(root)` only."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `MissingError` if there is none."""

    @abstractmethod
    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to a local path. Raises `MissingError` if there is none, and OSError if the
        copy cannot be written."""

    @abstractmethod
    def write(self, name: str, content: bytes | Path) -> None:
        """Store bytes or a copy of a local file, whole or not at all; an older file is replaced."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return True if there is a file of this name."""
