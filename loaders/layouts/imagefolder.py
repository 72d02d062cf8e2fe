"""One folder per class, in folders of splits if these exist, else split by seed."""

import os
from collections import Counter
from pathlib import Path

import numpy as np

from conf.errors import UserError, check_utf8, counted, first_few
from conf.schema import DataConfig
from loaders.index import (
    IMAGE_ENDINGS,
    Index,
    folders_in,
    images_below,
    index_splits,
    read_headers,
    split_folders,
)
from loaders.targets import Labels


def imagefolder(data: DataConfig) -> tuple[Index, Index]:
    """Return the index of the training and of the validation split."""
    return class_folders(data, Path(data.root))


def test_imagefolder(data: DataConfig) -> Index:
    """Return the index of the test split."""
    return class_folders(data, Path(data.root), held_out="test")[1]


def class_folders(
    data: DataConfig, root: Path, held_out: str = "val", content: str = "rgb"
) -> tuple[Index, Index]:
    """Return the index of the training split and of `held_out`, `val` or `test`, below `root`.

    The images' content is of a kind of `ImageSpec.content`.

    Raises:
        UserError: the folders are not those of two classes or more that have images.
    """
    folders = split_folders(root, data, held_out)
    train = folders["train"]
    classes = sorted(folders_in(train))
    for name in classes:
        check_utf8(f"the name of a class folder in {train},", name)
    files: list[str] = []
    labels: dict[str, np.ndarray] = {}
    others: Counter[str] = Counter()
    for split, folder in folders.items():
        names = sorted(folders_in(folder))
        if not names:
            raise UserError(f"{folder} has no class folders; expected {folder}/<class>/<image>")
        if unknown := sorted({*names} - {*classes}):
            raise UserError(
                f"{folder} has classes that {train} does not have: {first_few(unknown)}; remove "
                "them or add training images"
            )
        below = {name: images_below(folder / name, others) for name in names}
        _check_level(folder, below)
        empty = [name for name, found in below.items() if not found]
        if empty and split == "train":
            raise UserError(
                f"{folder} has {counted(len(empty), 'class folder')} without an image "
                f"({', '.join(IMAGE_ENDINGS)}): {first_few(empty)}; remove them or add images"
            )
        files += [path for found in below.values() for path in found]
        counts = [len(below.get(name, ())) for name in classes]
        labels[split] = np.repeat(np.arange(len(classes)), counts)
    if len(classes) < 2:
        found = f"{counted(len(classes), 'class')} ({', '.join(classes)})"
        raise UserError(f"{root} has {found}; use 2 or more")
    values = np.concatenate([*labels.values()])
    return index_splits(
        root.name,
        data,
        (read_headers(files, data, content, others),),
        Labels(values, tuple(classes)),
        {split: len(numbers) for split, numbers in labels.items()},
        values,
    )


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
