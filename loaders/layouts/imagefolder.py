"""One folder per class, in folders of splits if these exist, else split by seed."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.file_index import index_splits, read_headers
from loaders.folders import IMAGE_ENDINGS, describe_others, folders_in, images_below
from loaders.index import Index
from loaders.splits import split_folders
from loaders.targets import Target


def imagefolder(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    return class_folders(data, splits, Path(data.root))


def class_folders(
    data: DataConfig, splits: Collection[str], root: Path, content: str = "rgb"
) -> dict[str, Index]:
    """Return the index of each of the splits that there is below `root`.

    The images' content is of a kind of `ImageSpec.content`. Names of classes that differ in their
    Unicode normal form alone, as macOS and Linux write them, are one class.
    """
    others = Counter[str]()
    files: list[str] = []
    names: list[str] = []  # of the classes of the files
    counts: dict[str, int] = {}
    folders = split_folders(root, data, splits)
    classes: list[str] = []
    for split, folder in folders.items():
        images = _images_of(folder, others, data.root)
        classes = classes or sorted(images)  # those of train, which comes first
        if unknown := sorted(images.keys() - {*classes}):
            raise UserError(
                f"{folder} has classes that {folders['train']} does not have: "
                f"{first_few(unknown)}; remove them or add training images"
            )
        if split == "train" and (empty := [name for name in classes if not images[name]]):
            raise UserError(
                f"{folder} has {counted(len(empty), 'class folder')} without an image "
                f"({', '.join(IMAGE_ENDINGS)}): {first_few(empty)}; remove them or add images"
            )
        for name, paths in sorted(images.items()):
            files += paths
            names += [name] * len(paths)
        counts[split] = sum(map(len, images.values()))
    if len(classes) < 2:
        found = f"{counted(len(classes), 'class')} ({', '.join(classes)})"
        raise UserError(f"{root} has {found}; use 2 or more")
    columns = read_headers([files], data, [content], describe_others(others))
    target = Target("labels", np.searchsorted(classes, names), tuple(classes))
    return index_splits(root.name, data, columns, target, counts)


def _images_of(split: Path, others: Counter[str], root: str) -> dict[str, list[str]]:
    """Return the paths below `root` of the images of each class; raise UserError if there are no
    class folders, or some hold folders of images alone: they may be the sets or classes."""
    images: dict[str, list[str]] = {}
    for name in sorted(folders_in(split)):
        found = images_below(split / name, others, root)
        if found and all("/" in image for image in found):
            raise UserError(
                f"{split / name} holds no images but folders of them; set data.root to the folder "
                "of the classes, or move the images up"
            )
        folder = Path(os.path.relpath(split, root), name)
        of_class = images.setdefault(unicodedata.normalize("NFC", name), [])
        of_class += [f"{folder}/{image}" for image in found]
    if not images:
        raise UserError(f"{split} has no class folders; expected {split}/<class>/<image>")
    return images
