"""One folder per class, in `train` and `val` (or `test`) if these exist, else split by seed."""

from pathlib import Path

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.index.files import (
    IMAGE_ENDINGS,
    folders_in,
    images_below,
    index_splits,
    parts_of,
    read_headers,
    split_folders,
)
from loaders.index.index import Index
from loaders.targets import Labels


def imagefolder(data: DataConfig) -> tuple[Index, Index]:
    return class_folders(data, Path(data.root))


def cells(data: DataConfig) -> tuple[Index, Index]:  # part: cells
    """List TIFFs with any number of channels, which stay as they are."""
    return class_folders(data, Path(data.root), keep_channels=True)


def class_folders(data: DataConfig, root: Path, keep_channels: bool = False) -> tuple[Index, Index]:
    splits = split_folders(root)
    classes = sorted(folders_in(splits[0]))
    if not classes:
        raise UserError(f"{splits[0]} has no class folders; expected {splits[0]}/<class>/<image>")
    files: list[str] = []
    counts: list[list[int]] = []
    for split in splits:
        unknown = set(folders_in(split)) - set(classes)
        if unknown:
            raise UserError(
                f"{split} has classes that {splits[0]} does not have: "
                f"{first_few(sorted(unknown))}; remove them or add training images"
            )
        by_class = [images_below(split / name) for name in classes]
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
        (read_headers(files, data, "stored" if keep_channels else "rgb"),),
        Labels(labels, tuple(classes)),
        parts_of([sum(split) for split in counts], data),
        keep_channels,
    )
