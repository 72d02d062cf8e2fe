"""Files under a root, and the errors of storages."""

import shutil
from pathlib import Path

from conf.errors import UserError
from conf.files import write_atomically


class StorageError(Exception):
    """A storage cannot be used now; the run may succeed later.

    It is not an OSError, which would mean that one file is bad.
    """


class MissingError(UserError):
    """There is no file of this name."""


class Storage:
    """Files under a root, for any number of threads and processes: a folder of this machine;
    `Bucket` reads and writes those of a server.

    Names are relative to the root, with `/` between their parts. All methods raise `StorageError`
    if the storage fails for `data.retry_s`, and `UserError` if it denies the request.

    Attributes:
        root: as given, with credentials; print `without_credentials(root)` only.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `MissingError` if there is none."""
        return self._existing(name).read_bytes()

    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to a local path. Raises `MissingError` if there is none, and OSError if the
        copy cannot be written."""
        shutil.copyfile(self._existing(name), path)

    def write(self, name: str, content: bytes | Path) -> None:
        """Store bytes or a copy of a local file, whole or not at all; an older file is replaced."""
        target = Path(self.root, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(target) as temporary:
            if isinstance(content, Path):
                shutil.copyfile(content, temporary)
            else:
                temporary.write_bytes(content)

    def exists(self, name: str) -> bool:
        """Return True if there is a file of this name."""
        return Path(self.root, name).is_file()

    def _existing(self, name: str) -> Path:
        path = Path(self.root, name)
        if not path.is_file():
            raise MissingError(f"{path} does not exist; set data.root to the folder that holds it")
        return path
