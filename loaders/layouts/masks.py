"""Images and the classes of their pixels: the same relative path below two folders."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from conf.data.masks import MasksConfig
from conf.errors import UserError, first_few
from loaders.file_index import index_splits
from loaders.index import Index
from loaders.layouts.pairs import find_pairs, size_factor
from loaders.targets import Masks


def masks(data: MasksConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    if "test" in splits and data.num_classes is None:  # whose masks may lack classes
        num_classes = len(masks(data, ("train", "val"))["train"].target.classes)
        data = replace(data, num_classes=num_classes)
    images, found, counts = find_pairs(data, splits, "indices")
    if (factor := size_factor(images, found)) > 1:
        raise UserError(
            f"the masks below {data.root} are {factor} times as large as their images; store each "
            "mask as large as its image"
        )
    num_classes = _num_classes(data, found.paths, found.headers["highest"])
    bits = found.headers["bits"].max()
    target = Masks(
        classes=tuple(map(str, range(num_classes))),
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


def _num_classes(data: MasksConfig, files: list[str], highest: np.ndarray) -> int:
    """Return `data.num_classes`, or the number of classes that the masks have.

    Raises:
        UserError: the masks hold higher indices, or too few to know the number.
    """
    top = int(highest.max())
    if top < 0:
        raise UserError(
            f"the masks in {data.root} hold nothing but data.ignore_index={data.ignore_index}; use "
            "masks with classes"
        )
    if data.num_classes is not None:
        above = [files[i] for i in np.flatnonzero(highest >= data.num_classes)]
        if above:
            raise UserError(
                f"{len(above)} of {len(files)} masks have indices up to {top}, above those of "
                f"data.num_classes={data.num_classes}: {first_few(above)}; raise it, correct the "
                "masks, or set data.ignore_index to the index of pixels without a class"
            )
        return data.num_classes
    if top < 1 or top == 255:
        raise UserError(
            f"the masks below {data.root} have indices up to {top}, such as "
            f"{files[int(highest.argmax())]}; set data.ignore_index=255 if 255 means no class, "
            "store the second of two classes as 1, or set data.num_classes if this is right"
        )
    return top + 1
