"""Training does not see the test split, and folds divide the data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.index import Index
from loaders.open_index import open_index
from loaders.targets import describe_target
from tests.helpers import make_config, refused
from tests.images import index_of, make_photos, paths_in, photos_in, reading
from tests.kinds import KINDS, SPLIT


def splits_of(*overrides: str) -> dict[str, Index]:
    """The index of each split."""
    return open_index(make_config(*overrides).data, ("train", "val", "test"))


def folds_of(*options: str) -> list[tuple[Index, Index]]:
    return [index_of(*options, f"data.fold={k}", "data.num_folds=3") for k in range(3)]


def names_of(*indexes: Index) -> set[str]:
    return {path for index in indexes for path in paths_in(index)}


@pytest.mark.parametrize("kind", SPLIT)
def test_training_does_not_look_at_the_test_split(kind: str, tmp_path: Path) -> None:
    """Which may be broken; folds divide the training split, and leave it alone."""
    write, without_val = SPLIT[kind]
    options = write(root := tmp_path / "data")
    train, val, test = splits_of(*options).values()
    assert len(test)
    assert not names_of(test) & names_of(train, val)
    assert describe_target(test.target) == describe_target(train.target)
    with refused("data.fold=0", "validation split"):
        index_of(*options, "data.fold=0")
    without_val(root)
    assert splits_of(*options, "data.fold=0")["test"].fingerprint == test.fingerprint
    for path in names_of(test):
        Path(path).write_bytes(b"no image")
    folds = folds_of(*options)
    assert sorted(x for _, held_out in folds for x in names_of(held_out)) == sorted(names_of(train))
    for pair in folds:
        assert names_of(*pair) == names_of(train)
        assert all(describe_target(one.target) == describe_target(train.target) for one in pair)


def test_without_val_test_validates_and_is_no_test_split(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for split, count in (("train", 9), ("test", 6)):
        make_photos(root / split, count)
    options = photos_in(root)

    def sizes_of(*more: str) -> dict[str, int]:
        return {split: len(index) for split, index in splits_of(*options, *more).items()}

    assert sizes_of() == {"train": 9, "val": 6}
    assert sizes_of(f"data.root={root / 'train'}") == {"train": 8, "val": 1}
    folds = sizes_of("data.fold=0", "data.num_folds=3")
    assert folds == {"train": 6, "val": 3, "test": 6}
    make_photos(root / "val", 3)
    assert sizes_of() == {"train": 9, "val": 3, "test": 6}


@pytest.mark.parametrize("kind", KINDS)
def test_folds_are_disjoint_cover_the_data_and_keep_class_shares(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    data = KINDS[kind](root)
    is_split = (root / "train").is_dir()
    options = [*data.options, *reading(root / "train" if is_split else root)]
    folds = folds_of(*options)
    every = sorted(name for _, val in folds for name in names_of(val))
    assert len(every) == len({*every})
    for train, val in folds:
        assert sorted(names_of(train, val)) == every
        assert not names_of(train) & names_of(val)
        assert abs(len(val) - len(every) / 3) < 1
    counts: Any = [val.target.class_counts() for _, val in folds]
    if counts[0] is not None:
        assert (np.ptp(counts, axis=0) <= (1 if folds[0][0].target.kind == "labels" else 2)).all()
        assert np.min(counts) > 0
    again, other = (folds_of(*options, seed) for seed in ("seed=1", "data.split_seed=1"))
    assert [val.fingerprint for _, val in again] == [val.fingerprint for _, val in folds]
    assert [names_of(val) for _, val in other] != [names_of(val) for _, val in folds]
