"""The index of the layouts that consist of image files."""

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.files import Files, paths_of
from loaders.folders import IMAGE_ENDINGS, describe_others
from loaders.headers import ImageFiles
from loaders.index import Index, new_index
from loaders.splits import parts_of
from loaders.targets import ImageSpec, Target


def index_splits(
    name: str,
    data: DataConfig,
    splits: Collection[str],
    sides: tuple[ImageFiles, ...],
    target: Target,
    counts: dict[str, int],
    labels: np.ndarray | None = None,
) -> dict[str, Index]:
    """Build the index of the training samples and of those that are held out, by split.

    Args:
        name: name of the data set, for messages.
        data: the configuration.
        splits: those that are wanted besides `train`.
        sides, target: files and targets of all samples, those of `train` first.
        counts: number of samples of each split that there is; without `val`, if it is wanted, those
            of `train` are split by seed.
        labels: see `split_by_seed`.
    """
    listed = listed_files(data)
    indexes = {
        split: file_index(
            f"{name}/{split}",
            data.root,
            tuple(side.take(part) for side in sides),
            target.take(part),
            listed,
        )
        for split, part in parts_of(counts, data, splits, labels).items()
    }
    train = indexes["train"]
    for index in indexes.values():
        if train.inputs != index.inputs:
            raise UserError(
                f"{train.name} has {counted(train.inputs.channels, 'channel')} of "
                f"{train.inputs.dtype}, but {index.name} {index.inputs.channels} of "
                f"{index.inputs.dtype}; use images of one kind"
            )
    return indexes | {"train": replace(train, notes=(*train.notes, *train.target.notes()))}


def listed_files(data: DataConfig) -> frozenset[str]:
    """Return the paths in the file `data.leave_out`, one a line.

    Raises:
        UserError: it cannot be read.
    """
    if data.leave_out is None:
        return frozenset()
    try:
        text = Path(data.leave_out).read_text(errors="surrogateescape")
    except OSError as error:
        raise UserError(
            f"data.leave_out={data.leave_out} cannot be read ({error.strerror}); give a file with "
            "a path in each line, as python -m loaders.check ... out=FILE writes it"
        ) from error
    return frozenset(os.path.normpath(line) for line in text.splitlines() if line.strip())


def file_index(
    name: str,
    root: str,
    sides: tuple[ImageFiles, ...],
    target: Target,
    listed: Collection[str] = (),
) -> Index:
    """Build the index of image files, all of which lie below `root`, but for those `listed`.

    Raises:
        UserError: there are no images, or they differ in number of channels or bits.
    """
    is_good = np.all([side.headers["height"] > 0 for side in sides], axis=0)
    broken = sides[-1].broken | sides[0].broken
    left_out = {}
    for sample in np.flatnonzero(~is_good):  # of two bad files, one counts
        path = next(side.paths[sample] for side in sides if side.paths[sample] in broken)
        left_out[path] = broken[path]
    if listed:
        for side in sides:
            is_listed = [os.path.normpath(path) in listed for path in side.paths]
            is_good &= ~np.array(is_listed, bool)
    if not is_good.all():
        good = np.flatnonzero(is_good)
        sides, target = tuple(side.take(good) for side in sides), target.take(good)
    files, headers = sides[0].paths, sides[0].headers
    if not files:
        bad = first_few([f"{path} ({reason})" for path, reason in left_out.items()])
        raise UserError(
            f"{name} has no images{f' that can be used: {bad}' if bad else ''}; expected files "
            f"like {', '.join(IMAGE_ENDINGS)}"
        )
    kinds = headers[["channels", "bits"]]
    channels, bits = kinds[0].item()
    wrong = np.flatnonzero(kinds != kinds[0])
    if len(wrong):
        other = kinds[wrong[0]]
        raise UserError(
            f"{len(wrong)} of {len(files)} images of {name} differ in channels or bits: "
            f"{files[0]} has {counted(channels, 'channel')} of {bits} bits, {files[wrong[0]]} "
            f"{other['channels']} of {other['bits']}; use images of one kind"
        )
    return new_index(
        name,
        sides[0].sizes,
        target,
        ImageSpec(channels, f"uint{bits}", content=sides[0].content),
        Files(
            tuple(paths_of(side.paths, root) for side in sides),
            tuple(side.headers for side in sides),
        ),
        left_out,
        (*describe_others(sides[0].others), *_describe_transparent(sides)),
    )


def _describe_transparent(sides: tuple[ImageFiles, ...]) -> tuple[str, ...]:
    """Return a line on how many images may have transparent pixels, if there are any."""
    backgrounds = np.concatenate([side.headers["background"] for side in sides])
    backgrounds = backgrounds[backgrounds >= 0]
    if not len(backgrounds):
        return ()
    colour = [*int(backgrounds[0]).to_bytes(3)]
    return (f"{len(backgrounds):,} images may be transparent: data.background={colour} shows",)
