"""Two images that belong together: the same relative path below two folders."""

import os
from pathlib import Path

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.index.files import (
    IMAGE_ENDINGS,
    file_index,
    images_below,
    split_by_seed,
    split_folders,
)
from loaders.index.headers import read_headers
from loaders.index.index import Index
from loaders.targets import TargetImages

Sides = tuple[list[str], list[str]]
"""Paths of the inputs and of their targets."""


def pairs(data: DataConfig) -> tuple[Index, Index]:
    root = Path(data.root)
    train, val = (
        _pair_index(f"{root.name}/{name}", sides, headers)
        for name, (sides, headers) in zip(("train", "val"), find_pairs(data, "rgb"), strict=True)
    )
    if train.size_factors != val.size_factors:
        raise UserError(
            f"targets of {train.name} are {train.size_factors[1]} times as large as their inputs, but "
            f"those of {val.name} {val.size_factors[1]} times; use one factor for both"
        )
    return train, val


def find_pairs(data: DataConfig, target_content: str) -> list[tuple[Sides, list[np.ndarray]]]:
    """Paths and headers of both sides, of the training and of the validation split.

    Args:
        data: the configuration.
        target_content: `ImageSpec.content` of the targets.
    """
    files = [_pairs_below(split, data) for split in split_folders(Path(data.root))]
    headers = [
        [read_headers(inputs, data, "rgb"), read_headers(targets, data, target_content)]
        for inputs, targets in files
    ]
    if len(files) == 1:
        (inputs, targets), parts = files[0], split_by_seed(len(files[0][0]), data)
        files = [([inputs[i] for i in part], [targets[i] for i in part]) for part in parts]
        headers = [[side[part] for side in headers[0]] for part in parts]
    return list(zip(files, headers, strict=True))


def _pairs_below(folder: Path, data: DataConfig) -> Sides:
    sides = []
    for name in (data.input_dir, data.target_dir):
        if not (folder / name).is_dir():
            raise UserError(
                f"{folder / name} is not a folder; expected {folder}/{data.input_dir} and "
                f"{folder}/{data.target_dir} (data.input_dir and data.target_dir)"
            )
        # By path without the ending: an input may be a JPEG and its target a PNG.
        found = images_below(folder / name)
        by_stem = {
            os.path.splitext(os.path.relpath(path, folder / name))[0]: path for path in found
        }
        if len(by_stem) < len(found):
            raise UserError(
                f"{folder / name} has images that differ in their ending only; the partner of an "
                "image is found by its name: remove one of each"
            )
        sides.append(by_stem)
    inputs, targets = sides
    unpaired = [inputs[stem] for stem in sorted(inputs.keys() - targets.keys())]
    unpaired += [targets[stem] for stem in sorted(targets.keys() - inputs.keys())]
    if unpaired:
        raise UserError(
            f"{len(unpaired)} images in {folder} have no partner: {first_few(unpaired)}; add the partners or "
            "remove these"
        )
    if not inputs:
        raise UserError(
            f"{folder / data.input_dir} has no image; expected {', '.join(IMAGE_ENDINGS)}"
        )
    stems = sorted(inputs)
    return [inputs[stem] for stem in stems], [targets[stem] for stem in stems]


def _pair_index(name: str, files: Sides, headers: list[np.ndarray]) -> Index:
    inputs, targets = (np.stack([side["height"], side["width"]], axis=1) for side in headers)
    is_good = (inputs[:, 0] > 0) & (targets[:, 0] > 0)
    first = int(is_good.argmax())
    factor = int(targets[first, 0] // max(1, inputs[first, 0]))
    wrong = np.flatnonzero(is_good & ((targets != factor * inputs).any(axis=1) | (factor < 1)))
    if len(wrong):
        i = wrong[0]
        sizes = [f"{height}x{width}" for height, width in (inputs[i], targets[i])]
        raise UserError(
            f"the images of {len(wrong)} pairs do not have the same size"
            + (f" times {factor}" if factor > 1 else "")
            + f", such as {files[0][i]} ({sizes[0]}) and {files[1][i]} ({sizes[1]}); a target must be "
            "as large as its input, or larger by one whole factor in all pairs"
        )
    return file_index(name, files, tuple(headers), TargetImages(factor))
