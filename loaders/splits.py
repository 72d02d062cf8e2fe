"""Which samples train and which are held out: by folders, by names or by seed."""

import logging
import re
from collections.abc import Collection
from pathlib import Path

import numpy as np

from conf.errors import UserError, counted, first_few
from conf.schema import DataConfig
from loaders.folders import folders_in

log = logging.getLogger(__name__)

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


def used_splits(found: Collection[str], data: DataConfig, where: str) -> dict[str, str]:
    """Return, for each split, the one of a data set with the splits `found` that is used as it:
    without `val`, `test` validates and there is no test split, unless `data.fold` is set."""
    used = {split: split for split in SPLIT_NAMES if split in found}
    if "test" in used and "val" not in used and data.fold is None:
        log.info("test of %s validates, as there is no val: nothing is left to test", where)
        used["val"] = used.pop("test")
    if unknown := sorted({*found} - SPLIT_NAMES.keys()):
        raise UserError(f"{where} has {first_few(unknown)}; use {', '.join(SPLIT_NAMES)}")
    if "train" not in used or ("val" not in used and data.fold is None):
        raise UserError(
            f"{where} has {' and '.join(sorted(found))}; it needs one split for training and one "
            "for validation or tests, such as train and val: add, rename or remove some"
        )
    return used


def split_folders(root: Path, data: DataConfig, splits: Collection[str]) -> dict[str, Path]:
    """Return the folders of those of the `splits` that there are; that of `train` alone, which may
    be the root, if its samples are to be split by seed.

    Folders named after splits are classes if they hold no folders and are not of both splits.
    """
    if not root.is_dir():
        raise UserError(f"data.root={root} is not a folder; set data.root to the data set's folder")
    named: dict[str, Path] = {}
    for name in sorted(folders_in(root)):
        word = re.sub(r"[ _-]?(set|split)$", "", name.casefold())
        split = next((split for split, names in SPLIT_NAMES.items() if word in names), None)
        if split in named:
            raise UserError(
                f"{root} has {named[split].name} and {name} for {split}; rename or remove one"
            )
        if split:
            named[split] = root / name
    is_both = "train" in named and len(named) > 1
    if not is_both and not any(any(folders_in(folder)) for folder in named.values()):
        return {"train": root}
    used = used_splits(named, data, str(root))
    return {split: named[name] for split, name in used.items() if split in splits}


def split_by_seed(
    count: int, data: DataConfig, labels: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split `count` samples by `data.split_seed`: return the sorted positions of those that train,
    and of those that validate.

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
            f"a validation split of {len(val)} of {counted(count, 'sample')} leaves one split "
            "empty; set data.val_fraction, data.val_count or data.num_folds"
        )
    return np.setdiff1d(order, val), np.sort(val)


def check_no_split(data: DataConfig) -> None:
    """Raise UserError if keys of `split_by_seed` are set for data that is split already."""
    given = [
        f"data.{key}={getattr(data, key)}"
        for key in ("val_fraction", "val_count", "split_seed", "fold")
        if getattr(data, key) != getattr(DataConfig, key)
    ]
    if given:
        raise UserError(
            f"data={data.layout} has a validation split of its own in data.root={data.root}; leave "
            f"out {', '.join(given)}"
        )
