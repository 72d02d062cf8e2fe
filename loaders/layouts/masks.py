"""Images and the classes of their pixels: the same relative path below two folders."""

from collections.abc import Collection, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.columns import Columns
from loaders.file_index import index_splits
from loaders.images import PNG_START
from loaders.index import Index, path_below
from loaders.layouts.pairs import find_pairs, size_factor
from loaders.targets import Target


def masks(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    files, counts = find_pairs(data, splits, "indices")
    if (factor := size_factor(files, data)) > 1:
        raise UserError(
            f"the masks below {data.root} are {factor} times as large as their images; store each "
            "mask as large as its image"
        )
    num_classes = _num_classes(data, files, counts.get("test", 0))
    names = tuple(map(str, range(num_classes)))
    target = Target("masks", names=names, ignore_index=data.ignore_index)
    name = Path(data.root).name
    indexes = index_splits(name, data, files, target, counts)
    for index in indexes.values():
        if index.headers[1]["highest"].max() < 0:
            raise UserError(
                f"the {len(index)} masks of {index.name} in {data.root} hold nothing but "
                f"data.ignore_index={data.ignore_index}; use masks with classes"
            )
    return indexes


def _num_classes(data: DataConfig, files: Columns, num_tests: int) -> int:
    """Return `data.num_classes`, or the number of classes that the masks have but for the last
    `num_tests`; raise UserError if masks hold higher indices, or too few to know the number."""
    highest = files["headers-1"]["highest"]
    top = int(highest[: len(highest) - num_tests].max())
    num_classes = data.num_classes or top + 1
    is_sure = data.num_classes is not None or 1 <= top != 255
    now = num_classes if is_sure else None
    wrong = np.flatnonzero(highest >= (num_classes if is_sure else top))
    if len(wrong):
        paths = [path_below(data.root, name) for name in files["names-1"][wrong]]
        raise UserError(
            f"{len(wrong)} of {len(highest)} masks have indices up to {highest.max()}, such as "
            f"{first_few(paths, 2)}; set data.num_classes (now {now}) to the number of classes, or "
            "data.ignore_index=255 if 255 means no class, or correct the masks"
        )
    return num_classes


def other_palettes(indexes: Sequence[Index], broken: Collection[str]) -> dict[str, str]:
    """Return the masks, by place, that are PNGs with another palette than those before them, but
    for `broken` ones. Above the highest index of a mask, there may be any colours."""
    first, found = b"", {}
    for index in indexes:
        for sample, highest in enumerate(index.headers[1]["highest"].tolist()):
            place = index.place_of(sample, 1)
            content = b"" if place in broken else index.content(sample, 1)
            if not content.startswith(PNG_START):
                continue
            with Image.open(BytesIO(content)) as mask:
                colours = bytes(mask.palette.palette) if mask.palette else b""
            colours = colours[: 3 * (highest + 1)]
            first += colours[len(first) :]
            if not first.startswith(colours):
                found[place] = "has another palette than masks before it; use one for all"
    return found
