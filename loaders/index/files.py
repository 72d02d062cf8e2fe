"""Splitting and checking image files, for the layouts that consist of them."""

from collections import Counter
from dataclasses import replace

import numpy as np

from conf.errors import UserError, first_few
from conf.schema import DataConfig
from loaders.index.folders import IMAGE_ENDINGS, describe_others, held_out_split
from loaders.index.header_cache import kept_headers
from loaders.index.headers import ImageFiles
from loaders.index.index import Index
from loaders.index.paths import paths_of
from loaders.targets import Target, describe_missing

Parts = tuple[np.ndarray, np.ndarray]
"""Sorted positions of the training and of the validation samples."""


def parts_of(
    counts: list[int], data: DataConfig, held_out: str = "val", labels: np.ndarray | None = None
) -> Parts:
    """Return the positions of the samples of each split, from the number of samples in each of
    `split_folders`; see `split_by_seed` for `labels`."""
    if len(counts) == 1:
        return split_by_seed(counts[0], data, labels)
    if held_out == "val":
        check_no_split(data, f"data.root={data.root}")
    positions = np.arange(sum(counts))
    return positions[: counts[0]], positions[counts[0] :]


def split_by_seed(count: int, data: DataConfig, labels: np.ndarray | None = None) -> Parts:
    """Split `count` samples by `data.split_seed`.

    With `data.fold`, all folds have the same number of samples of each of the `labels`, (count,)
    ints, up to one.
    """
    num_val = data.val_count if data.val_count is not None else round(count * data.val_fraction)
    order = np.random.Generator(np.random.Philox(key=data.split_seed)).permutation(count)
    val = order[:num_val]
    if data.fold is not None:
        if labels is not None:
            order = order[np.argsort(labels[order], kind="stable")]
        val = order[data.fold :: data.num_folds]
    if not 0 < len(val) < count:
        raise UserError(
            f"a validation split of {len(val)} of {count} samples leaves one split empty; set "
            "data.val_fraction, data.val_count or data.num_folds"
        )
    return np.setdiff1d(order, val), np.sort(val)


def split_by_names(
    splits: np.ndarray, data: DataConfig, held_out: str, labels: np.ndarray | None, where: str
) -> Parts:
    """Return the positions of the samples of each split, by (N,) names, empty without a split.

    See `split_by_seed` for `labels`; `where` names the column of the names in messages.
    """
    has_names = bool(splits[0])
    found = held_out_split(held_out, {*splits.tolist()}, data, where)
    train = np.flatnonzero(splits == "train") if has_names else np.arange(len(splits))
    if len(train) and (found is None or not has_names):
        first, second = split_by_seed(len(train), data, None if labels is None else labels[train])
        return train[first], train[second]
    if held_out == "val":
        check_no_split(data, where)
    others = np.flatnonzero(splits == found)
    if len(train) and len(others):
        return train, others
    raise UserError(
        f"{where} has {len(train)} lines of train and {len(splits) - len(train)} of val or test; "
        "it needs some of both, or remove the column"
    )


def check_no_split(data: DataConfig, where: str) -> None:
    """Raise UserError if keys of `split_by_seed` are set for data that is split already."""
    given = [
        f"data.{key}={getattr(data, key)}"
        for key in ("val_fraction", "val_count", "split_seed", "fold")
        if getattr(data, key) != getattr(DataConfig, key)
    ]
    if given:
        raise UserError(f"{where} has a validation split of its own; leave out {', '.join(given)}")


def read_headers(
    files: list[str], data: DataConfig, content: str, others: Counter[str] | None = None
) -> ImageFiles:
    """Read the headers of files; see `kept_headers` and, for `others`, `images_below`.

    Raises:
        UserError: some have no readable header or are too large, without `data.on_error=skip`.
    """
    headers, broken = kept_headers(files, data, content)
    named = [f"{path} ({reason})" for path, reason in broken.items()]
    if data.on_error == "skip":
        named = []
    if named:
        raise UserError(
            f"{len(named)} of {len(files)} files cannot be used: {first_few(named)}; repair or "
            "remove them"
        )
    return ImageFiles(files, headers, broken, others or Counter())


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
    return replace(train, notes=train.notes + describe_missing(train.target)), val


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
    is_bad = np.stack([side.headers["height"] == 0 for side in sides])
    left_out = {}
    for sample in np.flatnonzero(is_bad.any(axis=0)):
        side = sides[is_bad[:, sample].argmax()]  # of two bad files, one counts
        left_out[side.paths[sample]] = side.broken[side.paths[sample]]
    if left_out:
        good = np.flatnonzero(~is_bad.any(axis=0))
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
        notes=describe_others(sum((side.others for side in sides), Counter())),
    )
