"""One folder per class, in `train` and `val` (or `test`) if these exist, else split by seed."""

import shutil
from pathlib import Path

import numpy as np

from conf.schema import DataConfig
from loaders.headers import one_process_at_a_time, read_headers, some
from loaders.index import Index
from loaders.layouts.files import (
    IMAGE_ENDINGS,
    file_index,
    folders_in,
    images_below,
    or_generate,
    refuse_to_fill,
    split_by_seed,
    split_folders,
)
from loaders.targets import Labels

CALTECH256 = "caltech256/256_ObjectCategories"


def imagefolder(data: DataConfig) -> tuple[Index, Index]:
    return class_folders(data, Path(data.root))


def cells(data: DataConfig) -> tuple[Index, Index]:
    """TIFFs whose channels stay as they are."""
    return class_folders(data, Path(data.root), as_stored=True)


def caltech256(data: DataConfig) -> tuple[Index, Index]:
    folder = Path(data.root, CALTECH256)
    if not folder.is_dir():
        refuse_to_fill(Path(data.root), "caltech256")
        try:
            with one_process_at_a_time(Path(data.root) / "download"):
                if not folder.is_dir():  # which another process may have unpacked meanwhile
                    _unpack_caltech256(folder)
        except (RuntimeError, OSError) as error:
            raise FileNotFoundError(
                f"Caltech-256 is not in {data.root} and could not be downloaded ({error}); unpack "
                f"256_ObjectCategories.tar into {folder.parent}"
                + or_generate(f"caltech256 --root {folder} --size 3000")
            ) from error
    return class_folders(data, folder)


def _unpack_caltech256(folder: Path) -> None:
    """Make `folder`, which is whole once it is there, from the archive beside it, which is downloaded if it
    is missing."""
    from torchvision.datasets import Caltech256

    unfinished = folder.with_name("download.unfinished").absolute()
    shutil.rmtree(unfinished, ignore_errors=True)  # that of a process that was stopped
    unpacked = unfinished / CALTECH256
    unpacked.parent.mkdir(parents=True)
    # Through the link the archive is found where it lies, and outlives what is unfinished.
    unpacked.with_suffix(".tar").symlink_to(folder.with_suffix(".tar").absolute())
    Caltech256(unfinished, download=True)
    unpacked.rename(folder)
    shutil.rmtree(unfinished)


def class_folders(data: DataConfig, root: Path, as_stored: bool = False) -> tuple[Index, Index]:
    splits = split_folders(root)
    classes = sorted(folders_in(splits[0]))
    if not classes:
        raise ValueError(f"{splits[0]} has no class folders; expected {splits[0]}/<class>/<image>")
    files: list[list[str]] = []
    labels: list[np.ndarray] = []
    for split in splits:
        unknown = set(folders_in(split)) - set(classes)
        if unknown:
            raise ValueError(
                f"{split} has classes that {splits[0]} does not have: {some(unknown)}; "
                "remove them or add training images"
            )
        by_class = [images_below(split / name) for name in classes]
        empty = [name for name, found in zip(classes, by_class, strict=True) if not found]
        if empty and split == splits[0]:
            raise ValueError(
                f"{split} has {len(empty)} class folders without an image ({', '.join(IMAGE_ENDINGS)}): "
                f"{some(empty)}; remove the folders or add images"
            )
        files.append([name for found in by_class for name in found])
        labels.append(np.repeat(np.arange(len(classes)), [len(found) for found in by_class]))
    content = "stored" if as_stored else "rgb"
    headers = [read_headers(names, data, content) for names in files]
    if len(splits) == 1:
        parts = split_by_seed(len(files[0]), data)
        files = [[files[0][i] for i in part] for part in parts]
        headers = [headers[0][part] for part in parts]
        labels = [labels[0][part] for part in parts]
    train, val = (
        file_index(
            f"{root.name}/{split}", (paths,), (header,), Labels(label, tuple(classes)), as_stored
        )
        for split, paths, header, label in zip(
            ("train", "val"), files, headers, labels, strict=True
        )
    )
    if (train.channels, train.dtype) != (val.channels, val.dtype):
        raise ValueError(
            f"{train.name} has {train.channels} channels of {train.dtype}, but {val.name} "
            f"{val.channels} of {val.dtype}; use images of one kind"
        )
    return train, val
