"""Images and the classes of their pixels: the same relative path below two folders."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from conf.data.masks import MasksConfig
from conf.errors import UserError, first_few
from loaders.images import decode
from loaders.index import ImageFiles, Index, in_threads, index_splits
from loaders.layouts.pairs import find_pairs, size_factor
from loaders.targets import Masks


def masks(data: MasksConfig, held_out: str = "val") -> tuple[Index, Index]:
    """Return the index of the training split and of `held_out`, `val` or `test`."""
    images, found, parts = find_pairs(data, "indices", held_out)
    if (factor := size_factor(images, found)) > 1:
        raise UserError(
            f"the masks below {data.root} are {factor} times as large as their images; store each "
            "mask as large as its image"
        )
    highest = found.headers["highest"]
    for split, part in zip(("training", held_out), parts, strict=True):
        if highest[part].max() < 0:
            raise UserError(
                f"the {len(part)} {split} masks below {data.root} hold nothing but "
                f"data.ignore_index={data.ignore_index}; use masks with classes"
            )
    _check_palettes(found, data.ignore_index)
    num_classes = _num_classes(data, found.paths, highest)
    target = Masks(
        classes=tuple(map(str, range(num_classes))),
        ignore_index=data.ignore_index,
        stored_dtype=f"uint{found.headers['bits'].max()}",
    )
    name, sides = Path(data.root).name, (images, found)
    return index_splits(name, data.root, sides, target, parts, held_out=held_out)


def test_masks(data: MasksConfig) -> Index:
    """Return the index of the test split, whose masks may lack classes."""
    num_classes = len(masks(data)[0].target.classes)  # type: ignore[attr-defined]
    return masks(replace(data, num_classes=num_classes), "test")[1]


def _num_classes(data: MasksConfig, files: list[str], highest: np.ndarray) -> int:
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
    if top < 1 or top == 255:
        raise UserError(
            f"the masks below {data.root} have indices up to {top}, such as "
            f"{files[int(highest.argmax())]}; set data.ignore_index=255 if 255 means no class, "
            "store the second of two classes as 1, or set data.num_classes if this is right"
        )
    return top + 1


def _check_palettes(found: ImageFiles, ignore_index: int) -> None:
    """Raise UserError if a class has different colours in two files, as where each has a palette of
    the colours that occur in it: its indices then mean something else."""
    masks = [mask for mask in zip(found.paths, found.headers, strict=True) if mask[1]["height"]]
    palettes = in_threads(_palette_of, masks, "reading palettes")
    if len({*palettes} - {b""}) < 2:
        return
    first: dict[int, tuple[bytes, str]] = {}
    all_indices = in_threads(_indices_in, masks, "comparing palettes")
    for (path, _), palette, indices in zip(masks, palettes, all_indices, strict=True):
        for index in {*indices} - {ignore_index} if palette else ():
            colour = palette[3 * index : 3 * index + 3]
            other, other_path = first.setdefault(index, (colour, path))
            if colour != other:
                raise UserError(
                    f"the index {index} has the colour {(*other,)} in {other_path} but "
                    f"{(*colour,)} in {path}; store the masks with one palette, or without any"
                )


def _palette_of(mask: tuple[str, np.void]) -> bytes:
    """Return the colours of a PNG with a palette, three bytes each; none of other files."""
    with suppress(UnidentifiedImageError), Image.open(mask[0], formats=["PNG"]) as image:
        if image.palette:
            return bytes(image.palette.palette)
    return b""


def _indices_in(mask: tuple[str, np.void]) -> list[int]:
    """Return the indices that occur in a mask, a path and its header."""
    return np.unique(decode(Path(mask[0]).read_bytes(), mask[1], "indices")).tolist()
