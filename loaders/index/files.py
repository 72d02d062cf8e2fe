"""The index of image files, for the layouts that consist of them."""

from dataclasses import replace

import numpy as np

from conf.errors import UserError, first_few
from loaders.index.folders import IMAGE_ENDINGS, describe_others
from loaders.index.headers import ImageFiles
from loaders.index.index import Index, paths_of
from loaders.index.splits import Parts
from loaders.targets import Target


def index_splits(
    name: str,
    root: str,
    sides: tuple[ImageFiles, ...],
    target: Target,
    parts: Parts,
    keep_channels: bool = False,
    held_out: str = "val",
) -> tuple[Index, Index]:
    """Build the index of the training samples and of those of `held_out`, `val` or `test`; see
    `file_index`.

    `sides` and `target` are of the samples of both splits, `parts` their positions in each split.
    """
    train, val = (
        file_index(
            f"{name}/{split}",
            root,
            tuple(side.take(part) for side in sides),
            target.take(part),
            keep_channels,
        )
        for split, part in zip(("train", held_out), parts, strict=True)
    )
    if (train.channels, train.dtype) != (val.channels, val.dtype):
        raise UserError(
            f"{train.name} has {train.channels} channels of {train.dtype}, but {val.name} "
            f"{val.channels} of {val.dtype}; use images of one kind"
        )
    classes, counts = getattr(train.target, "classes", ()), train.target.class_counts()
    if counts is None or counts.all():
        return train, val
    missing = [name for name, count in zip(classes, counts, strict=True) if not count]
    line = f"{len(missing)} classes have no training sample: {first_few(missing)}"
    return replace(train, notes=(*train.notes, line)), val


def file_index(
    name: str,
    root: str,
    sides: tuple[ImageFiles, ...],
    target: Target,
    keep_channels: bool = False,
) -> Index:
    """Build the index of image files, all of which lie below `root`.

    Raises:
        UserError: there are no images, or they differ in number of channels or bits.
    """
    is_good = np.all([side.headers["height"] > 0 for side in sides], axis=0)
    broken = sides[-1].broken | sides[0].broken
    left_out = {}
    for sample in np.flatnonzero(~is_good):  # of two bad files, one counts
        path = next(side.paths[sample] for side in sides if side.paths[sample] in broken)
        left_out[path] = broken[path]
    if left_out:
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
            f"{files[0]} has {channels} channels of {bits} bits, {files[wrong[0]]} "
            f"{other['channels']} of {other['bits']}; use images of one kind"
        )
    return Index(
        name=name,
        sizes=sides[0].sizes,
        channels=channels,
        target=target,
        dtype=f"uint{bits}",
        files=tuple(paths_of(side.paths, root) for side in sides),
        headers=tuple(side.headers for side in sides),
        keep_channels=keep_channels,
        left_out=left_out,
        notes=describe_others(sides[0].others),
    )
