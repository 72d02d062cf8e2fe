"""Two images that belong together: the same relative path below two folders."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.data.pairs import PairsConfig
from conf.errors import UserError, counted, first_few
from loaders.file_index import index_splits
from loaders.folders import IMAGE_ENDINGS, images_below
from loaders.headers import ImageFiles, read_headers
from loaders.index import Index
from loaders.splits import split_folders
from loaders.targets import TargetImages


def pairs(data: PairsConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    inputs, targets, counts = find_pairs(data, splits, "rgb")
    target = TargetImages(size_factor(inputs, targets))
    return index_splits(Path(data.root).name, data, splits, (inputs, targets), target, counts)


def find_pairs(
    data: PairsConfig, splits: Collection[str], target_content: str
) -> tuple[ImageFiles, ImageFiles, dict[str, int]]:
    """Return the files of both sides, and the number of samples of each split that there is.

    The targets' content is of the kind `target_content`, see `ImageSpec.content`.
    """
    others: Counter[str] = Counter()
    folders = split_folders(Path(data.root), data, splits)
    below = {name: _pairs_below(folder, data, others) for name, folder in folders.items()}
    both = [pair for found in below.values() for pair in found]
    counts = {name: len(found) for name, found in below.items()}
    inputs = read_headers([first for first, _ in both], data, "rgb", others)
    targets = read_headers([second for _, second in both], data, target_content)
    _check_turned(inputs, targets, data)
    return inputs, targets, counts


def _pairs_below(folder: Path, data: PairsConfig, others: Counter[str]) -> list[tuple[str, str]]:
    """Return the paths of each input and its target; see `images_below` for `others`."""
    sides = []
    for side in (folder / data.input_dir, folder / data.target_dir):
        if not side.is_dir():
            raise UserError(
                f"{side} is not a folder; expected {folder}/{data.input_dir} and "
                f"{folder}/{data.target_dir} (data.input_dir and data.target_dir)"
            )
        found = images_below(side, others, data.root)
        by_stem = {_stem_of(path, side): path for path in found}
        if len(by_stem) < len(found):
            raise UserError(
                f"{side} has images that differ in their ending only; the partner of an image is "
                "found by its name: remove one of each"
            )
        sides.append(by_stem)
    inputs, targets = sides
    unpaired = [inputs[stem] for stem in sorted(inputs.keys() - targets.keys())]
    unpaired += [targets[stem] for stem in sorted(targets.keys() - inputs.keys())]
    if unpaired:
        raise UserError(
            f"{folder} has {counted(len(unpaired), 'image')} without a partner: "
            f"{first_few(unpaired)}; add the partners or remove these"
        )
    if not inputs:
        raise UserError(
            f"{folder / data.input_dir} contains no images ({', '.join(IMAGE_ENDINGS)})"
        )
    return [(inputs[stem], targets[stem]) for stem in sorted(inputs)]


def _stem_of(path: str, side: Path) -> str:
    """Return what an image and its partner are both called: their path without the ending, as one
    may be a JPEG and the other a PNG, and in one Unicode normal form, which systems choose."""
    return unicodedata.normalize("NFC", os.path.splitext(os.path.relpath(path, side))[0])


def _check_turned(inputs: ImageFiles, targets: ImageFiles, data: PairsConfig) -> None:
    """Raise UserError if inputs are turned by their EXIF orientation and their targets are not, so
    that it is unknown how they lie on each other, unless `data.exif` tells."""
    turned, other = (side.headers["orientation"] for side in (inputs, targets))
    found = np.flatnonzero((turned > 1) & (other > 0) & (turned != other))
    if len(found) and data.exif is None:
        raise UserError(
            f"{len(found)} of {len(turned)} inputs are turned by their EXIF orientation, but not "
            f"their targets: {first_few(inputs.paths[i] for i in found)}; set data.exif=true if "
            "the targets fit the upright inputs, or data.exif=false if they fit them as stored"
        )


def size_factor(input_files: ImageFiles, target_files: ImageFiles) -> int:
    """Return the height and width of the targets, divided by those of their inputs.

    Raises:
        UserError: it is not an integer, or not the same for all pairs.
    """
    inputs, targets = input_files.sizes, target_files.sizes
    is_good = (inputs[:, 0] > 0) & (targets[:, 0] > 0)
    first = int(is_good.argmax())
    factor = int(targets[first, 0] // max(1, inputs[first, 0]))
    wrong = np.flatnonzero(is_good & (targets != factor * inputs).any(axis=1))
    if len(wrong):
        i = wrong[0]
        sizes = [f"{height}x{width}" for height, width in (inputs[i], targets[i])]
        raise UserError(
            f"{counted(len(wrong), 'pair')} of images without the same size times "
            f"{max(1, factor)}, such as {input_files.paths[i]} ({sizes[0]}) and "
            f"{target_files.paths[i]} ({sizes[1]}); a target must be as large as its input, or "
            "larger by one whole factor in all pairs"
        )
    return max(1, factor)  # 0: no pair is good
