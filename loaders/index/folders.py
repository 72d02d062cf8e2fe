"""Which folders and files of a data set count, and which of its files are images."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from conf.errors import counted, first_few

IMAGE_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp")
SYSTEM_NAMES = (
    *("@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "~snapshot"),
    *("__macosx", "network trash folder", "temporary items", "icon\r"),
    *("$recycle.bin", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini"),
    *("lost+found", "__pycache__"),
)
"""Folders and files of file servers, macOS, Windows, Linux and Python, in lower case."""


def is_system(name: str) -> bool:
    """Return True for names that begin with a dot and for those of `SYSTEM_NAMES`."""
    return name.startswith(".") or name.casefold() in SYSTEM_NAMES


def folders_in(folder: Path) -> Iterator[str]:
    """Yield the names of the folders in a folder, without those of `is_system`."""
    with os.scandir(folder) as entries:
        yield from (e.name for e in entries if not is_system(e.name) and e.is_dir())


def images_below(folder: Path, others: Counter[str] | None = None) -> list[str]:
    """Return the sorted paths of all images below a folder, without those of `is_system`; `others`
    counts the endings of the other files.

    Raises:
        OSError: a folder cannot be read, as where a link leads to a parent folder.
    """
    found, others = [], Counter() if others is None else others
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_system(entry.name):
                continue
            if entry.is_dir():
                found += images_below(Path(entry.path), others)
            elif entry.name.lower().endswith(IMAGE_ENDINGS):
                found.append(entry.path)
            else:
                others[os.path.splitext(entry.name)[1].lower() or "no ending"] += 1
    return sorted(found)


def describe_others(others: Counter[str]) -> tuple[str, ...]:
    """Return a line with the numbers that `images_below` counted, such as `5 files left out, whose
    endings are not those of images: 4 .heic, 1 .txt`; none without files."""
    if not others:
        return ()
    counts = [f"{count:,} {ending}" for ending, count in others.most_common()]
    return (
        f"{counted(others.total(), 'file')} left out, whose endings are not those of images: "
        f"{first_few(counts)}",
    )
