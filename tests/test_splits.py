"""Training does not see the test split, and folds divide the data."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.index import Index
from loaders.open_index import open_index
from loaders.targets import describe_target
from tests import images
from tests.helpers import make_config, refused
from tests.images import (
    index_of,
    make_photos,
    paths_in,
    photos_in,
    reading,
    save,
    smooth,
)
from tests.parts import rows_of

KINDS = {"photos": images.photos, **dict(rows_of("KINDS"))}
SPLIT = {**images.SPLIT, **dict(rows_of("SPLIT"))}


def names_of(index: Index) -> set[str]:
    return set(paths_in(index))


def index_of_test(*overrides: str) -> Index:
    """The index of the test split."""
    return open_index(make_config(*overrides).data, ("train", "test"))["test"]


def sizes_of(*overrides: str, splits: Sequence[str]) -> dict[str, int]:
    indexes = open_index(make_config(*overrides).data, splits)
    return {split: len(index) for split, index in indexes.items()}


@pytest.mark.parametrize("kind", SPLIT)
def test_training_does_not_look_at_the_test_split(kind: str, tmp_path: Path) -> None:
    """Which may be broken."""
    write, _ = SPLIT[kind]
    options = write(tmp_path / "data")
    train, val = index_of(*options)
    test = index_of_test(*options)
    assert len(test)
    assert not names_of(test) & (names_of(train) | names_of(val))
    assert describe_target(test.target) == describe_target(train.target)
    for path in names_of(test):
        Path(path).write_bytes(b"no image")
    again = [index.fingerprint for index in index_of(*options)]
    assert again == [train.fingerprint, val.fingerprint]


def test_without_val_test_validates_and_is_no_test_split(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    make_photos(root / "train", 9)
    make_photos(root / "test", 6)
    options = photos_in(root)
    assert [len(index) for index in index_of(*options)] == [9, 6]
    every, unsplit = ("train", "val", "test"), [*options, f"data.root={root / 'train'}"]
    for given, sizes in ((options, {"train": 9, "val": 6}), (unsplit, {"train": 8, "val": 1})):
        assert sizes_of(*given, splits=every) == sizes
        assert [*sizes_of(*given, splits=("train", "test"))] == ["train"]
    folds = sizes_of(*options, "data.fold=0", "data.num_folds=3", splits=every)
    assert folds == {"train": 6, "val": 3, "test": 6}
    make_photos(root / "val", 3)
    assert [len(index) for index in index_of(*options)] == [9, 3]
    assert sizes_of(*options, splits=every) == {"train": 9, "val": 3, "test": 6}
    assert len(index_of_test(*options)) == 6


def test_a_class_has_one_folder_in_each_unicode_normal_form(tmp_path: Path) -> None:
    forms: Any = {"train": "NFC", "val": "NFD"}
    for split, form in forms.items():
        for name in ("\u00e9", "f"):
            folder = unicodedata.normalize(form, name)
            save(tmp_path / "photos" / split / folder / "1.png", smooth(1, 40, 40))
    save(tmp_path / "photos" / "train" / "F" / "1.png", smooth(1, 40, 40))
    train, val = index_of(*photos_in(tmp_path / "photos"))
    assert train.target.classes == val.target.classes == ("F", "f", "\u00e9")
    assert val.target.values.tolist() == [1, 2]
    assert any("F, f" in note for note in train.notes)


def folds_of(*options: str, count: int) -> list[tuple[Index, Index]]:
    return [index_of(*options, f"data.fold={k}", f"data.num_folds={count}") for k in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_folds_are_disjoint_cover_the_data_and_keep_class_shares(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    data = KINDS[kind](root)
    is_split = (root / "train").is_dir()
    options = [*data.options, *reading(root / "train" if is_split else root)]
    folds = folds_of(*options, count=3)
    every = sorted(name for _, val in folds for name in names_of(val))
    assert len(every) == len({*every})
    for train, val in folds:
        assert sorted(names_of(train) | names_of(val)) == every
        assert not names_of(train) & names_of(val)
        assert abs(len(val) - len(every) / 3) < 1
    counts: Any = [val.target.class_counts() for _, val in folds]
    if counts[0] is not None:
        assert (np.ptp(counts, axis=0) <= (1 if folds[0][0].target.kind == "labels" else 2)).all()
        assert np.min(counts) > 0
    again, other = folds_of(*options, count=3), folds_of(*options, "data.split_seed=1", count=3)
    assert [val.fingerprint for _, val in again] == [val.fingerprint for _, val in folds]
    assert [names_of(val) for _, val in other] != [names_of(val) for _, val in folds]


@pytest.mark.parametrize("kind", SPLIT)
def test_folds_divide_the_training_split_and_leave_the_test_split_alone(
    kind: str, tmp_path: Path
) -> None:
    write, without_val = SPLIT[kind]
    options = write(root := tmp_path / "data")
    with refused("data.fold=0", "validation split"):
        index_of(*options, "data.fold=0")
    train, _ = index_of(*options)
    test = index_of_test(*options)
    without_val(root)
    folds = folds_of(*options, count=3)
    assert sorted(x for _, val in folds for x in names_of(val)) == sorted(names_of(train))
    targets = [describe_target(index.target) for pair in folds for index in pair]
    assert all(target == describe_target(train.target) for target in targets)
    assert index_of_test(*options, "data.fold=0").fingerprint == test.fingerprint
