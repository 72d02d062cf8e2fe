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
    return class_folders(data, Path(data.root))


def test_imagefolder(data: DataConfig) -> Index:
    return class_folders(data, Path(data.root), held_out="test")[1]


def class_folders(
    data: DataConfig, root: Path, keep_channels: bool = False, held_out: str = "val"
) -> tuple[Index, Index]:
    splits = split_folders(root, data, held_out)
    classes = sorted(folders_in(splits[0]))
    for name in classes:
        check_utf8(f"the name of a class folder in {splits[0]},", name)
    files: list[str] = []
    counts: list[list[int]] = []
    others: Counter[str] = Counter()
    for split in splits:
        names = set(folders_in(split))
        if not names:
            raise UserError(f"{split} has no class folders; expected {split}/<class>/<image>")
        if unknown := names - set(classes):
            raise UserError(
                f"{split} has classes that {splits[0]} does not have: "
                f"{first_few(sorted(unknown))}; remove them or add training images"
            )
        by_class = [images_below(split / name, others) for name in classes]
        _check_level(split, classes, by_class)
        empty = [name for name, found in zip(classes, by_class, strict=True) if not found]
        if empty and split == splits[0]:
            raise UserError(
                f"{split} has {len(empty)} class folders without an image "
                f"({', '.join(IMAGE_ENDINGS)}): {first_few(empty)}; remove them or add images"
            )
        files += [path for found in by_class for path in found]
        counts.append([len(found) for found in by_class])
    labels = np.repeat(np.tile(np.arange(len(classes)), len(splits)), np.ravel(counts))
    return index_splits(
        root.name,
        data.root,
        (read_headers(files, data, "stored" if keep_channels else "rgb", others),),
        Labels(labels, tuple(classes)),
        parts_of([sum(split) for split in counts], data, held_out, labels),
        keep_channels,
        held_out,
    )


def _check_level(split: Path, classes: list[str], by_class: list[list[str]]) -> None:
    """Raise UserError unless the folders in `split` are two classes or more, with images."""
    above = [
        split / name
        for name, found in zip(classes, by_class, strict=True)
        if found and not any(os.path.dirname(path) == str(split / name) for path in found)
    ]
    if above:
        fix = (
            f"set data.root={above[0]}"
            if len(classes) == 1
            else "set data.root to the folder of the classes"
        )
        raise UserError(
            f"{len(above)} of {len(classes)} class folders in {split} hold no images but folders: "
            f"{first_few(path.name for path in above)}; {fix}, move the "
            "images up, or list them in a table (data=table)"
        )
    if len(classes) < 2:
        raise UserError(f"{split} has {len(classes)} classes ({', '.join(classes)}); use 2 or more")
