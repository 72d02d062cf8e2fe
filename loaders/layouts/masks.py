"""Images and the classes of their pixels: the same relative path below two folders."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.file_index import index_splits
from loaders.headers import ImageFiles
from loaders.index import Index
from loaders.layouts.pairs import find_pairs
from loaders.targets import Masks


def masks(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    if "test" in splits and data.num_classes is None:  # whose masks may lack classes
        num_classes = len(masks(data, ("train", "val"))["train"].target.classes)
        data = replace(data, num_classes=num_classes)
    images, found, counts, factor = find_pairs(data, splits, "indices")
    if factor > 1:
        raise UserError(
            f"the masks below {data.root} are {factor} times as large as their images; store each "
            "mask as large as its image"
        )
    bits = found.headers["bits"].max()
    target = Masks(
        classes=tuple(map(str, range(_num_classes(data, found)))),
        ignore_index=data.ignore_index,
        stored_dtype="int32" if bits == 32 else f"uint{bits}",
    )
    indexes = index_splits(Path(data.root).name, data, splits, (images, found), target, counts)
    for index in indexes.values():
        if index.source.headers[1]["highest"].max() < 0:
            raise UserError(
                f"the {len(index)} masks of {index.name} in {data.root} hold nothing but "
                f"data.ignore_index={data.ignore_index}; use masks with classes"
            )
    return indexes


def _num_classes(data: DataConfig, found: ImageFiles) -> int:
    """Return `data.num_classes`, or the number of classes that the masks have.

    Raises:
        UserError: the masks hold higher indices, or too few to know the number.
    """
    highest = found.headers["highest"]
    top = int(highest.max())
    if data.num_classes is None:
        num_classes, is_sure = top + 1, 1 <= top != 255
    else:
        num_classes, is_sure = data.num_classes, top < data.num_classes
    if not is_sure:
        above = [found.paths[i] for i in np.flatnonzero(highest == top)]
        raise UserError(
            f"{len(above)} of {len(highest)} masks have indices up to {top}, such as "
            f"{first_few(above, 2)}; set data.num_classes (now {data.num_classes}) to the number "
            "of classes, or data.ignore_index=255 if 255 means no class, or correct the masks"
        )
    return num_classes
