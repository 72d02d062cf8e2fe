"""Which folders and files of a data set count, and which of its files are images."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from conf.errors import UserError, counted, first_few

IMAGE_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp")
SYSTEM_NAMES = (
    *("@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "~snapshot"),
    *("__macosx", "network trash folder", "temporary items", "icon\r"),
    *("$recycle.bin", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini"),
    *("lost+found", "__pycache__"),
)
"""Folders and files of file servers, macOS, Windows, Linux and Python, in lower case."""
OUTSIDE = "links"  # no ending of a file


def is_system(name: str) -> bool:
    """Return True for names that begin with a dot and for those of `SYSTEM_NAMES`."""
    return name.startswith(".") or name.casefold() in SYSTEM_NAMES


def folders_in(folder: Path) -> Iterator[str]:
    """Yield the names of the folders in a folder, without those of `is_system`."""
    with os.scandir(folder) as entries:
        yield from (e.name for e in entries if not is_system(e.name) and e.is_dir())


def images_below(
    folder: Path, others: Counter[str], root: str, above: tuple[str, ...] = ()
) -> list[str]:
    """Return the sorted paths, from a folder on, of all images below it, without those of
    `is_system`.

    Args:
        folder: folder, which may be a link, as may be what is in it.
        others: counts the endings of the other files, and links out of `root` as `OUTSIDE`.
        root: folder of the data set.
        above: the folders that led to this one, without links.

    Raises:
        UserError: a link leads back to a folder above it.
        OSError: a folder cannot be read.
    """
    found: list[str] = []
    here = os.path.realpath(folder)
    if here in above:
        raise UserError(f"{folder} is {here} again, by a link; remove this link")
    links = [here] if folder.is_symlink() else []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_system(entry.name):
                continue
            if entry.is_dir():
                deeper = images_below(Path(entry.path), others, root, (*above, here))
                found += [f"{entry.name}/{path}" for path in deeper]
            elif entry.name.lower().endswith(IMAGE_ENDINGS):
                found.append(entry.name)
                if entry.is_symlink():
                    links.append(os.path.realpath(entry.path))
            else:
                others[os.path.splitext(entry.name)[1].lower() or "no ending"] += 1
    if links:
        inside = os.path.join(os.path.realpath(root), "")
        others[OUTSIDE] += sum(not link.startswith(inside) for link in links)
    return sorted(found)


def describe_others(others: Counter[str]) -> tuple[str, ...]:
    """Return lines on what `images_below` counted, such as `5 files left out, whose endings are not
    those of images: 4 .heic, 1 .txt`; none of what there is not."""
    lines = []
    num_links = others.pop(OUTSIDE, 0)
    if others:
        counts = first_few(f"{count:,} {ending}" for ending, count in others.most_common())
        files = counted(others.total(), "file")
        lines.append(f"{files} left out, whose endings are not those of images: {counts}")
    if num_links:
        lines.append(f"{counted(num_links, 'link')} out of data.root followed")
    return tuple(lines)
