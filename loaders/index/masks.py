"""Images and the classes of their pixels: the same relative path below two folders."""

from pathlib import Path

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.index.files import index_splits
from loaders.index.index import Index
from loaders.index.pairs import find_pairs, size_factor
from loaders.targets import Masks


def masks(data: DataConfig) -> tuple[Index, Index]:
    images, found, parts = find_pairs(data, "indices")
    if (factor := size_factor(images, found)) > 1:
        raise UserError(
            f"the masks below {data.root} are {factor} times as large as their images; store each "
            "mask as large as its image"
        )
    num_classes = _num_classes(data, found.paths, found.headers["highest"])
    target = Masks(
        classes=tuple(map(str, range(num_classes))),
        ignore_index=data.ignore_index,
        stored_dtype=f"uint{found.headers['bits'].max()}",
    )
    return index_splits(Path(data.root).name, data.root, (images, found), target, parts)


def _num_classes(data: DataConfig, files: list[str], highest: np.ndarray) -> int:
    """Return `data.num_classes`, or the number of classes that the masks have.

    Raises:
        UserError: the masks hold higher indices, or too few to know the number.
    """
    top = int(highest.max())
    if data.num_classes is not None:
        above = [files[i] for i in np.flatnonzero(highest >= data.num_classes)]
        if above:
            raise UserError(
                f"{len(above)} of {len(files)} masks have indices up to {top}, above those of "
                f"data.num_classes={data.num_classes}: {first_few(above)}; raise it, correct the "
                "masks, or set data.ignore_index to the index of pixels without a class"
            )
        return data.num_classes
    if top == 255:
        raise UserError(
            f"the masks have indices up to 255, such as {files[int(highest.argmax())]}; if these "
            "are pixels without a class, set data.ignore_index=255; if they are the second of two "
            "classes, store it as 1; otherwise set data.num_classes=256"
        )
    if top < 1:
        raise UserError(
            f"the {len(files)} masks below {data.root} hold no class above 0; set data.num_classes "
            "if there are others"
        )
    return top + 1
