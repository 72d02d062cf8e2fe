"""Storage in a folder of this machine."""

import shutil
from pathlib import Path

from conf.files import write_atomically
from loaders.storage.base import MissingError, Storage


class Folder(Storage):
    """The files below the folder `root`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.path = Path(root)

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
