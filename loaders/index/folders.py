"""Which folders of a data set are splits or classes, and which of its files are images."""

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from conf.errors import UserError, first_few
from conf.schema import DataConfig

log = logging.getLogger(__name__)

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


def held_out_split(wanted: str, found: Collection[str], data: DataConfig, where: str) -> str | None:
    """Return the split that a data set with the splits `found` holds out from training: `wanted`,
    `val` or `test`. Without `val`, `test` validates or, with `data.fold`, a part of training: None.

    Raises:
        UserError: there is no test split, or it validates.
    """
    test_validates = "val" not in found and data.fold is None
    if wanted == "test" and ("test" not in found or test_validates):
        why = "chose the best epoch, as there is no val" if "test" in found else "does not exist"
        raise UserError(f"split=test: test of {where} {why}; use split=val (docs/splits.md)")
    if wanted in found:
        return wanted
    if "test" in found and test_validates:
        log.info(
            "test of %s is used for validation, as there is no val: nothing is left to test", where
        )
    return "test" if test_validates else None


def split_folders(root: Path, data: DataConfig, wanted: str = "val") -> list[Path]:
    """Return the folders of training and of `wanted`, `val` or `test`; a single one, the root or
    that of training, if its samples are to be split by seed.

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
    is_split = is_both or any(any(folders_in(root / name)) for name in names)
    held_out = held_out_split(wanted, named if is_split else (), data, str(root))
    if not is_split:
        return [root]
    train, others = named.get("train", []), named.get(held_out or "", [])
    if held_out is None and len(train) == 1:
        return [root / train[0]]
    if len(train) != 1 or len(others) != 1:
        raise UserError(
            f"{root} has {' and '.join(names)}; it needs one folder for training and one for "
            f"validation or tests, such as train and {wanted}: add, rename or remove folders"
        )
    return [root / train[0], root / others[0]]


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
