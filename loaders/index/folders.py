"""Which folders of a data set are splits or classes, and which of its files are images."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from conf.errors import UserError, first_few

IMAGE_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp")
VALIDATION_SPLITS = ("val", "test")
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
SYSTEM_NAMES = (
    *("@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "~snapshot"),
    *("__macosx", "network trash folder", "temporary items", "icon\r"),
    *("$recycle.bin", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini"),
    *("lost+found", "__pycache__"),
)
"""Folders and files of file servers, macOS, Windows, Linux and Python, in lower case."""
MAX_DEPTH = 20
"""Folders below each other in a data set."""


def is_system(name: str) -> bool:
    """Return True for names that begin with a dot and for those of `SYSTEM_NAMES`."""
    return name.startswith(".") or name.casefold() in SYSTEM_NAMES


def split_of(name: str) -> str | None:
    """Return the split that a folder is named after, such as `train` for `Training` or `train_set`;
    None if it is named after none."""
    word = re.sub(r"[ _-]?(set|split)$", "", name.casefold())
    return next((split for split, names in SPLIT_NAMES.items() if word in names), None)


def split_folders(root: Path) -> list[Path]:
    """Return [training, validation] folders, or [root] if there are none.

    Folders named after splits are classes if they hold no folders and are not of both splits.

    Raises:
        UserError: there is no such folder, or not one folder of each split.
    """
    if not root.is_dir():
        raise UserError(f"data.root={root} is not a folder; set data.root to the data set's folder")
    named: dict[str, list[str]] = {}
    for name in sorted(folders_in(root)):
        if split := split_of(name):
            named.setdefault(split, []).append(name)
    names = [name for several in named.values() for name in several]
    is_both = "train" in named and len(named) > 1
    if not (is_both or any(any(folders_in(root / name)) for name in names)):
        return [root]
    train = named.get("train", [])
    val = next((named[split] for split in VALIDATION_SPLITS if split in named), [])
    if len(train) != 1 or len(val) != 1:
        raise UserError(
            f"{root} has {' and '.join(names)}; it needs one folder for training and one for "
            "validation, such as train and val: add, rename or remove folders"
        )
    return [root / train[0], root / val[0]]


def folders_in(folder: Path) -> Iterator[str]:
    """Yield the names of the folders in a folder, without those of `is_system`."""
    with os.scandir(folder) as entries:
        yield from (e.name for e in entries if not is_system(e.name) and e.is_dir())


def images_below(folder: Path, others: Counter[str] | None = None) -> list[str]:
    """Return the sorted paths of all images below a folder, without those of `is_system`; empty if
    there is no such folder.

    Args:
        folder: the folder.
        others: counts the endings of the other files.

    Raises:
        UserError: folders lie too deep, as where a link leads to a parent folder.
        OSError: a folder cannot be read.
    """
    found: list[str] = []
    others = Counter() if others is None else others
    if not os.path.isdir(folder):
        return found
    for current, folders, names in os.walk(folder, onerror=_fail, followlinks=True):
        if len(Path(current).parts) - len(folder.parts) > MAX_DEPTH:
            raise UserError(
                f"{current} lies more than {MAX_DEPTH} folders below {folder}; remove the link "
                "in it that leads to a parent folder"
            )
        folders[:] = [name for name in folders if not is_system(name)]
        for name in names:
            if is_system(name):
                continue
            if name.lower().endswith(IMAGE_ENDINGS):
                found.append(os.path.join(current, name))
            else:
                others[os.path.splitext(name)[1].lower() or "no ending"] += 1
    return sorted(found)


def describe_others(others: Counter[str]) -> tuple[str, ...]:
    """Return a line with the numbers that `images_below` counted, such as `5 files are left out, as
    their endings are not those of images: 4 .heic, 1 .txt`; none without files."""
    if not others:
        return ()
    counts = [f"{count:,} {ending}" for ending, count in others.most_common()]
    return (
        f"{others.total():,} files are left out, as their endings are not those of images: "
        f"{first_few(counts)}",
    )


def _fail(error: OSError) -> None:
    raise error
