"""Two images that belong together: the same relative path below two folders."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.columns import Columns
from loaders.file_index import index_splits, read_headers, sizes_of
from loaders.folders import describe_others, images_below
from loaders.index import Index, path_below
from loaders.splits import split_folders
from loaders.targets import Target


def pairs(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    files, counts = find_pairs(data, splits, "rgb")
    target = Target("images", size_factor=size_factor(files, data))
    return index_splits(Path(data.root).name, data, files, target, counts)


def find_pairs(
    data: DataConfig, splits: Collection[str], target_content: str
) -> tuple[Columns, dict[str, int]]:
    """Return the files of both sides, and the number of samples of each split that there is.

    The targets' content is of the kind `target_content`, see `ImageSpec.content`.
    """
    others = Counter[str]()
    paths: tuple[list[str], list[str]] = ([], [])
    counts: dict[str, int] = {}
    for split, folder in split_folders(Path(data.root), data, splits).items():
        inputs, targets = (
            _images_by_stem(folder / name, data, others)
            for name in (data.input_dir, data.target_dir)
        )
        both = inputs | targets
        without = sorted(inputs.keys() ^ targets.keys())
        unpaired = [os.path.join(data.root, both[stem]) for stem in without]
        if unpaired or not inputs:
            raise UserError(
                f"{folder} has {counted(len(inputs), 'input')} and "
                f"{counted(len(unpaired), 'image')} without a partner: {first_few(unpaired)}; add "
                "the partners or remove these"
            )
        for side, found in zip(paths, (inputs, targets), strict=True):
            side += [found[stem] for stem in sorted(found)]
        counts[split] = len(inputs)
    files = read_headers(paths, data, ("rgb", target_content), describe_others(others))
    turned, other = (headers["orientation"] for headers in files.of_sides("headers"))
    unclear = np.flatnonzero((turned > 1) & (other > 0) & (turned != other))
    if len(unclear) and data.exif is None:
        turned_paths = [path_below(data.root, name) for name in files["names-0"][unclear]]
        raise UserError(
            f"{len(unclear)} of {len(turned)} inputs are turned by their EXIF orientation, but not "
            f"their targets: {first_few(turned_paths)}; set data.exif=true if "
            "the targets fit the upright inputs, or data.exif=false if they fit them as stored"
        )
    return files, counts


def _images_by_stem(side: Path, data: DataConfig, others: Counter[str]) -> dict[str, str]:
    """Return the paths below `data.root` of images by what an image and its partner are both
    called: their path without the ending, as one may be a JPEG and the other a PNG, and in one
    Unicode normal form, which systems choose."""
    if not side.is_dir():
        raise UserError(
            f"{side} is not a folder; expected {data.input_dir} and {data.target_dir} in it "
            "(data.input_dir and data.target_dir)"
        )
    found = images_below(side, others, data.root)
    folder, by_stem = os.path.relpath(side, data.root), {}
    for path in found:
        stem = os.path.splitext(path)[0]
        by_stem[unicodedata.normalize("NFC", stem)] = f"{folder}/{path}"
    if len(by_stem) < len(found):
        raise UserError(
            f"{side} has images that differ in their ending only; the partner of an image is found "
            "by its name: remove one of each"
        )
    return by_stem


def size_factor(files: Columns, data: DataConfig) -> int:
    """Return the height and width of the targets, divided by those of their inputs; raise UserError
    if it is not an integer, or not the same for all pairs."""
    inputs, targets = map(sizes_of, files.of_sides("headers"))
    good = np.flatnonzero((inputs[:, 0] > 0) & (targets[:, 0] > 0))
    if not len(good):
        return 1
    factor = max(1, int(targets[good[0], 0] // inputs[good[0], 0]))
    wrong = good[(targets[good] != factor * inputs[good]).any(axis=1)]
    if len(wrong):
        i = wrong[0]
        named = [
            f"{path_below(data.root, names[i])} ({sizes[i, 0]}x{sizes[i, 1]})"
            for names, sizes in zip(files.of_sides("names"), (inputs, targets), strict=True)
        ]
        raise UserError(
            f"{counted(len(wrong), 'pair')} of images without the same size times {factor}, such "
            f"as {' and '.join(named)}; a target must be as large as its input, or larger by one "
            "whole factor in all pairs"
        )
    return factor
