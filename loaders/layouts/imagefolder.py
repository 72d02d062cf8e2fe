"""One folder per class, in folders of splits if these exist, else split by seed."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.errors import UserError, check_utf8, counted, first_few
from conf.schema import DataConfig
from loaders.file_index import index_splits
from loaders.folders import IMAGE_ENDINGS, folders_in, images_below
from loaders.headers import read_headers
from loaders.index import Index
from loaders.splits import split_folders
from loaders.targets import Labels


def imagefolder(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    return class_folders(data, splits, Path(data.root))


def class_folders(
    data: DataConfig, splits: Collection[str], root: Path, content: str = "rgb"
) -> dict[str, Index]:
    """Return the index of each of the splits that there is below `root`.

    The images' content is of a kind of `ImageSpec.content`. Names of classes that differ in their
    Unicode normal form alone, as macOS and Linux write them, are one class.

    Raises:
        UserError: the folders are not those of two classes or more that have images.
    """
    folders, others = split_folders(root, data, splits), Counter[str]()
    images = {split: _images_of(folder, others, data.root) for split, folder in folders.items()}
    classes = sorted(images["train"])
    for split, folder in folders.items():
        if unknown := sorted(images[split].keys() - images["train"].keys()):
            raise UserError(
                f"{folder} has classes that {folders['train']} does not have: "
                f"{first_few(unknown)}; remove them or add training images"
            )
    if empty := [name for name in classes if not images["train"][name]]:
        raise UserError(
            f"{folders['train']} has {counted(len(empty), 'class folder')} without an image "
            f"({', '.join(IMAGE_ENDINGS)}): {first_few(empty)}; remove them or add images"
        )
    if len(classes) < 2:
        found = f"{counted(len(classes), 'class')} ({', '.join(classes)})"
        raise UserError(f"{root} has {found}; use 2 or more")
    in_order = {split: [below.get(name, []) for name in classes] for split, below in images.items()}
    labels = {
        split: np.repeat(np.arange(len(classes)), [len(found) for found in by_class])
        for split, by_class in in_order.items()
    }
    files = [path for by_class in in_order.values() for found in by_class for path in found]
    values = np.concatenate([*labels.values()])
    return index_splits(
        root.name,
        data,
        splits,
        (read_headers(files, data, content, others),),
        Labels(values, tuple(classes)),
        {split: len(numbers) for split, numbers in labels.items()},
        values,
    )


def _images_of(split: Path, others: Counter[str], root: str) -> dict[str, list[str]]:
    """Return the paths of the images of each class; see `images_below` for `others` and `root`."""
    names = sorted(folders_in(split))
    below = {name: images_below(split / name, others, root) for name in names}
    if not below:
        raise UserError(f"{split} has no class folders; expected {split}/<class>/<image>")
    _check_level(split, below)
    images: dict[str, list[str]] = {}
    for name, found in below.items():
        check_utf8(f"the name of a class folder in {split},", name)
        images.setdefault(unicodedata.normalize("NFC", name), []).extend(found)
    return images


def _check_level(split: Path, below: dict[str, list[str]]) -> None:
    """Raise UserError if the images of some of these folders are all in folders below it."""
    above = [
        split / name
        for name, found in below.items()
        if found and not any(os.path.dirname(path) == str(split / name) for path in found)
    ]
    if above:
        root = f"={above[0]}" if len(below) == 1 else " to the folder of the classes"
        raise UserError(
            f"{len(above)} of {len(below)} class folders in {split} hold no images but folders: "
            f"{first_few(path.name for path in above)}; set data.root{root}, or move the images up"
        )
