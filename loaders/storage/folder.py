"""Storage in a folder of this machine."""

import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from conf.files import write_atomically
from loaders.storage.base import MissingError, Storage


def local_folder(root: str) -> Path | None:
    """Return the folder that a root names; None for an address of another machine."""
    if root.startswith("file://"):
        return Path(unquote(urlsplit(root).path))
    return None if "://" in root else Path(root)


class Folder(Storage):
    """The files below `root`, a path or an address that begins with `file://`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.path = local_folder(root) or Path(root)

    def read(self, name: str) -> bytes:
        return self._existing(name).read_bytes()

    def fetch(self, name: str, path: Path) -> None:
        shutil.copyfile(self._existing(name), path)

    def write(self, name: str, content: bytes | Path) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(target) as temporary:
            if isinstance(content, Path):
                shutil.copyfile(content, temporary)
            else:
                temporary.write_bytes(content)

    def exists(self, name: str) -> bool:
        return (self.path / name).is_file()

    def _existing(self, name: str) -> Path:
        if not self.exists(name):
            raise MissingError(
                f"{self.path / name} does not exist; set data.root to the folder that holds it"
            )
        return self.path / name
