"""The index of image files, for the layouts that consist of them."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.index.folders import IMAGE_ENDINGS, describe_others
from loaders.index.headers import ImageFiles
from loaders.index.index import Index
from loaders.index.paths import paths_of
from loaders.index.splits import parts_of
from loaders.targets import Target


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
    indexes = {
        split: file_index(
            f"{name}/{split}",
            data.root,
            tuple(side.take(part) for side in sides),
            target.take(part),
        )
        for split, part in parts_of(counts, data, splits, labels).items()
    }
    train = indexes["train"]
    for index in indexes.values():
        if (train.channels, train.dtype) != (index.channels, index.dtype):
            raise UserError(
                f"{train.name} has {counted(train.channels, 'channel')} of {train.dtype}, but "
                f"{index.name} {index.channels} of {index.dtype}; use images of one kind"
            )
    return indexes | {"train": replace(train, notes=(*train.notes, *train.target.notes()))}


def file_index(name: str, root: str, sides: tuple[ImageFiles, ...], target: Target) -> Index:
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
            f"{files[0]} has {counted(channels, 'channel')} of {bits} bits, {files[wrong[0]]} "
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
        keep_channels=sides[0].content == "stored",
        left_out=left_out,
        notes=(*describe_others(sides[0].others), *_describe_transparent(sides)),
    )


def _describe_transparent(sides: tuple[ImageFiles, ...]) -> tuple[str, ...]:
    """Return a line on how many images may have transparent pixels, if there are any."""
    backgrounds = np.concatenate([side.headers["background"] for side in sides])
    backgrounds = backgrounds[backgrounds >= 0]
    if not len(backgrounds):
        return ()
    colour = [*int(backgrounds[0]).to_bytes(3)]
    return (f"{len(backgrounds):,} images may be transparent: data.background={colour} shows",)
