"""One folder per class, in folders of splits if these exist, else split by seed."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted, first_few
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
        if unknown := sorted(images[split].keys() - {*classes}):
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
    files: list[str] = []
    labels: list[int] = []
    counts: dict[str, int] = {}
    for split, by_class in images.items():
        for label, name in enumerate(classes):
            found_here = by_class.get(name, [])
            files += found_here
            labels += [label] * len(found_here)
        counts[split] = len(files) - sum(counts.values())
    values = np.array(labels)
    target = Labels(values, tuple(classes))
    sides = (read_headers(files, data, content, others),)
    return index_splits(root.name, data, splits, sides, target, counts, values)


def _images_of(split: Path, others: Counter[str], root: str) -> dict[str, list[str]]:
    """Return the paths of the images of each class; see `images_below` for `others` and `root`.

    Raises:
        UserError: there are no class folders, or some hold folders of images alone: they may be
            the sets or classes.
    """
    images: dict[str, list[str]] = {}
    for name in sorted(folders_in(split)):
        found = images_below(split / name, others, root)
        if found and not any(os.path.dirname(path) == str(split / name) for path in found):
            raise UserError(
                f"{split / name} holds no images but folders of them; set data.root to the folder "
                "of the classes, or move the images up"
            )
        images.setdefault(unicodedata.normalize("NFC", name), []).extend(found)
    if not images:
        raise UserError(f"{split} has no class folders; expected {split}/<class>/<image>")
    return images
