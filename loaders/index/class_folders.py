"""One folder per class, in `train` and `val` (or `test`) if these exist, else split by seed."""

from pathlib import Path

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.index.files import (
    IMAGE_ENDINGS,
    file_index,
    folders_in,
    images_below,
    split_by_seed,
    split_folders,
)
from loaders.index.headers import read_headers
from loaders.index.index import Index
from loaders.targets import Labels


def imagefolder(data: DataConfig) -> tuple[Index, Index]:
    return class_folders(data, Path(data.root))


def class_folders(data: DataConfig, root: Path, keep_channels: bool = False) -> tuple[Index, Index]:
    splits = split_folders(root)
    classes = sorted(folders_in(splits[0]))
    if not classes:
        raise UserError(f"{splits[0]} has no class folders; expected {splits[0]}/<class>/<image>")
    files: list[list[str]] = []
    labels: list[np.ndarray] = []
    for split in splits:
        unknown = set(folders_in(split)) - set(classes)
        if unknown:
            raise UserError(
                f"{split} has classes that {splits[0]} does not have: {first_few(sorted(unknown))}; "
                "remove them or add training images"
            )
        by_class = [images_below(split / name) for name in classes]
        empty = [name for name, found in zip(classes, by_class, strict=True) if not found]
        if empty and split == splits[0]:
            raise UserError(
                f"{split} has {len(empty)} class folders without an image ({', '.join(IMAGE_ENDINGS)}): "
                f"{first_few(empty)}; remove the folders or add images"
            )
        files.append([name for found in by_class for name in found])
        labels.append(np.repeat(np.arange(len(classes)), [len(found) for found in by_class]))
    content = "stored" if keep_channels else "rgb"
    headers = [read_headers(names, data, content) for names in files]
    if len(splits) == 1:
        parts = split_by_seed(len(files[0]), data)
        files = [[files[0][i] for i in part] for part in parts]
        headers = [headers[0][part] for part in parts]
        labels = [labels[0][part] for part in parts]
    train, val = (
        file_index(
            f"{root.name}/{split}",
            (paths,),
            (header,),
            Labels(label, tuple(classes)),
            keep_channels,
        )
        for split, paths, header, label in zip(
            ("train", "val"), files, headers, labels, strict=True
        )
    )
    if (train.channels, train.dtype) != (val.channels, val.dtype):
        raise UserError(
            f"{train.name} has {train.channels} channels of {train.dtype}, but {val.name} "
            f"{val.channels} of {val.dtype}; use images of one kind"
        )
    return train, val
