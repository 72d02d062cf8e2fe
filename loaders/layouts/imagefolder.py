"""One folder per class, in folders of splits if these exist, else split by seed."""

import os
from collections import Counter
from pathlib import Path

import numpy as np

from conf.errors import UserError, check_utf8, first_few
from conf.schema import DataConfig
from loaders.index import (
    IMAGE_ENDINGS,
    Index,
    folders_in,
    images_below,
    index_splits,
    parts_of,
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
    data: DataConfig, root: Path, keep_channels: bool = False, held_out: str = "val"
) -> tuple[Index, Index]:
    """Return the index of the training split and of `held_out`, `val` or `test`, below `root`.

    With `keep_channels`, the images are TIFFs of any number of channels.

    Raises:
        UserError: the folders are not those of two classes or more that have images.
    """
    splits = split_folders(root, data, held_out)
    classes = sorted(folders_in(splits[0]))
    for name in classes:
        check_utf8(f"the name of a class folder in {splits[0]},", name)
    files: list[str] = []
    counts: list[list[int]] = []
    others: Counter[str] = Counter()
    for split in splits:
        names = sorted(folders_in(split))
        if not names:
            raise UserError(f"{split} has no class folders; expected {split}/<class>/<image>")
        if unknown := sorted({*names} - {*classes}):
            raise UserError(
                f"{split} has classes that {splits[0]} does not have: {first_few(unknown)}; remove "
                "them or add training images"
            )
        below = {name: images_below(split / name, others) for name in names}
        _check_level(split, below)
        empty = [name for name, found in below.items() if not found]
        if empty and split == splits[0]:
            raise UserError(
                f"{split} has {len(empty)} class folders without an image "
                f"({', '.join(IMAGE_ENDINGS)}): {first_few(empty)}; remove them or add images"
            )
        files += [path for found in below.values() for path in found]
        counts.append([len(below.get(name, ())) for name in classes])
    if len(classes) < 2:
        raise UserError(f"{root} has {len(classes)} classes ({', '.join(classes)}); use 2 or more")
    labels = np.repeat(np.tile(np.arange(len(classes)), len(splits)), np.ravel(counts))
    return index_splits(
        root.name,
        data.root,
        (read_headers(files, data, "stored" if keep_channels else "rgb", others),),
        Labels(labels, tuple(classes)),
        parts_of(list(map(sum, counts)), data, held_out, labels),
        keep_channels,
        held_out,
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
