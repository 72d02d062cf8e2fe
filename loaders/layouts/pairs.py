"""Two images that belong together: the same relative path below two folders."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.file_index import index_splits
from loaders.folders import images_below
from loaders.headers import ImageFiles, read_headers
from loaders.index import Index
from loaders.splits import split_folders
from loaders.targets import TargetImages


def pairs(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    inputs, targets, counts, factor = find_pairs(data, splits, "rgb")
    sides, target = (inputs, targets), TargetImages(factor)
    return index_splits(Path(data.root).name, data, splits, sides, target, counts)


def find_pairs(
    data: DataConfig, splits: Collection[str], target_content: str
) -> tuple[ImageFiles, ImageFiles, dict[str, int], int]:
    """Return the files of both sides, the number of samples of each split that there is, and the
    height and width of the targets, divided by those of their inputs.

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
    return inputs, targets, counts, _size_factor(inputs, targets)


def _pairs_below(folder: Path, data: DataConfig, others: Counter[str]) -> list[tuple[str, str]]:
    """Return the paths of each input and its target; see `images_below` for `others`."""
    inputs, targets = (
        _images_by_stem(folder / name, data, others) for name in (data.input_dir, data.target_dir)
    )
    unpaired = [inputs[stem] for stem in sorted(inputs.keys() - targets.keys())]
    unpaired += [targets[stem] for stem in sorted(targets.keys() - inputs.keys())]
    if unpaired or not inputs:
        raise UserError(
            f"{folder} has {counted(len(inputs), 'input')} and "
            f"{counted(len(unpaired), 'image')} without a partner: {first_few(unpaired)}; add the "
            "partners or remove these"
        )
    return [(inputs[stem], targets[stem]) for stem in sorted(inputs)]


def _images_by_stem(side: Path, data: DataConfig, others: Counter[str]) -> dict[str, str]:
    """Return the paths of images by what an image and its partner are both called: their path
    without the ending, as one may be a JPEG and the other a PNG, and in one Unicode normal form,
    which systems choose."""
    if not side.is_dir():
        raise UserError(
            f"{side} is not a folder; expected {data.input_dir} and {data.target_dir} in it "
            "(data.input_dir and data.target_dir)"
        )
    found = images_below(side, others, data.root)
    by_stem = {}
    for path in found:
        stem = os.path.splitext(os.path.relpath(path, side))[0]
        by_stem[unicodedata.normalize("NFC", stem)] = path
    if len(by_stem) < len(found):
        raise UserError(
            f"{side} has images that differ in their ending only; the partner of an image is found "
            "by its name: remove one of each"
        )
    return by_stem


def _check_turned(inputs: ImageFiles, targets: ImageFiles, data: DataConfig) -> None:
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


def _size_factor(inputs: ImageFiles, targets: ImageFiles) -> int:
    """Return the height and width of the targets, divided by those of their inputs.

    Raises:
        UserError: it is not an integer, or not the same for all pairs.
    """
    is_good = (inputs.sizes[:, 0] > 0) & (targets.sizes[:, 0] > 0)
    if not is_good.any():
        return 1
    first = int(is_good.argmax())
    factor = max(1, int(targets.sizes[first, 0] // inputs.sizes[first, 0]))
    wrong = np.flatnonzero(is_good & (targets.sizes != factor * inputs.sizes).any(axis=1))
    if len(wrong):
        i = wrong[0]
        named = [
            f"{side.paths[i]} ({side.sizes[i, 0]}x{side.sizes[i, 1]})" for side in (inputs, targets)
        ]
        raise UserError(
            f"{counted(len(wrong), 'pair')} of images without the same size times {factor}, such "
            f"as {' and '.join(named)}; a target must be as large as its input, or larger by one "
            "whole factor in all pairs"
        )
    return factor
