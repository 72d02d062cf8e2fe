"""Folders of images: splits and mistakes."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import refused
from tests.images import (
    FOLDERS,
    index_in,
    index_of,
    loaders_of,
    make_photos,
    paths_in,
    reading,
    save,
    smooth,
)
from tests.parts import rows_of


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Those that read 12 photos in three class folders."""
    return [*FOLDERS, *reading(make_photos(tmp_path / "photos", 12))]


def test_a_split_depends_on_a_seed_of_its_own(options: list[str]) -> None:
    """That its parts are disjoint, is in test_contract.py."""
    one, same, other = (
        [paths_in(index) for index in index_of(*options, seed)]
        for seed in ("seed=0", "seed=1", "data.split_seed=1")
    )
    assert one == same != other
    assert len(one[1]) == 1


SPLITS = [("Train", "Val"), ("training", "testing"), ("train_set", "val-set"), ("TRAIN", "TEST")]


@pytest.mark.parametrize("names", [*SPLITS, ("trainset", "Valid"), ("train", "validation")])
@pytest.mark.parametrize(
    ("layout", "classes"),
    [("data=imagefolder", 2), *rows_of("LAYOUTS_WITH_SPLITS")],
)
def test_folders_of_splits_in_any_usual_spelling_are_splits(
    names: tuple[str, str], layout: str, classes: int, tmp_path: Path
) -> None:
    for name, count in zip(names, (2, 1), strict=True):
        for number in range(count):
            for folder in ("input", "target"):  # classes, too
                save(tmp_path / "d" / name / folder / f"{number}.png", smooth(number, 8, 8))
    train, val = index_of(layout, *reading(tmp_path / "d"))
    assert [len(train), len(val)] == [2 * classes, classes]
    for index, name in ((train, names[0]), (val, names[1])):
        assert {Path(path).parts[-3] for path in paths_in(index)} == {name}


def test_a_class_may_be_called_train(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "photos" / "a").rename(tmp_path / "photos" / "train")
    target: Any = index_of(*options)[0].target
    assert target.classes == ("b", "c", "train")


def test_system_folders_are_skipped_and_other_endings_are_counted(options, tmp_path) -> None:
    root = tmp_path / "photos"
    before = [paths_in(index) for index in index_of(*options)]
    for folder in ("@eaDir", "lost+found", "$RECYCLE.BIN", ".git", "a/@eaDir/1.jpg", "__MACOSX"):
        save(root / folder / "thumbnail.png", smooth(0, 8, 8))
    others = [root / name for name in ("a/1.HEIC", "b/2.heic", "b/README")]
    for path in (*others, root / "a/Thumbs.db", root / "a/.hidden"):
        path.touch()
    loader, val = loaders_of(*options, "global_batch_size=2")
    assert [paths_in(index) for index in (index_in(loader), index_in(val))] == before
    told = "\n".join(loader.info.description)
    assert all(text in told for text in ("3 files", "2 .heic", "1 no ending"))
    for path in others[1:]:
        path.unlink()
    one = "\n".join(loaders_of(*options, "global_batch_size=2")[0].info.description)
    assert "1 file left out" in one
    others[0].unlink()
    next(root.glob("c/*")).rename(root / "c" / "phone.JFIF")
    loader, val = loaders_of(*options, "global_batch_size=2")
    assert len(index_in(loader)) + len(index_in(val)) == 12
    assert "left out" not in "\n".join(loader.info.description)


SPLIT = {f"{split}/{name}/1.png": 8 for split in ("train", "val") for name in "ab"}


@pytest.mark.parametrize(
    ("layout", "widths", "shown"),
    [
        ("data=imagefolder", {"a/1.png": 8, "b/.hidden.png": 8}, ["1 class folder ", ": b;"]),
        ("data=imagefolder", {"set/0/1.png": 8, "set/1/1.png": 8}, ["1 of 1", "/d/set, "]),
        ("data=imagefolder", {"a/1.png": 8, "b/c/1.png": 8}, ["1 of 2", ": b;", "data.root"]),
        ("data=imagefolder", {"a/1.png": 8}, ["1 class (a)"]),
        ("data=imagefolder", {"Train/a/1.png": 8, "train/a/1.png": 8}, ["Train and train"]),
        (
            "data=imagefolder",
            {"train/a/1.png": 8, "b/1.png": 8},
            ["d has train;", "such as train and val"],
        ),
        ("data=imagefolder", {"test/a/1.png": 8, "b/1.png": 8}, ["d has test;", "training"]),
        ("data=imagefolder", {"TRAIN/1.png": 8, "val/1.png": 8}, ["TRAIN has no class folders"]),
        ("data=imagefolder", SPLIT, ["data.val_count=1"]),
        *rows_of("BAD_FOLDERS"),
    ],
)
def test_bad_folders_are_refused_with_names(layout, widths, shown, tmp_path: Path) -> None:
    for name, width in widths.items():
        save(tmp_path / "d" / name, smooth(0, 8, width))
    with refused(*shown):
        index_of(*reading(tmp_path / "d"), layout, "data.val_count=1")
