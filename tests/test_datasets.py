"""Folders of images: splits and mistakes."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import refused
from tests.images import FOLDERS, index_of, make_photos, paths_in, reading, save, smooth
from tests.rows import rows


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Those that read 12 photos in three class folders."""
    return [*FOLDERS, *reading(make_photos(tmp_path / "photos", 12))]


SPLITS = [("Train", "Val"), ("training", "testing"), ("train_set", "dev")]


@pytest.mark.parametrize("names", SPLITS)
@pytest.mark.parametrize(
    ("layout", "classes"),
    [("data=imagefolder", 2), *rows(("data=pairs", 1))],
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
    for folder in ("@eaDir", ".git", "a/@eaDir/1.jpg"):
        save(root / folder / "thumbnail.png", smooth(0, 8, 8))
    for name in ("a/1.HEIC", "b/2.heic", "b/README", "a/Thumbs.db", "a/.hidden"):
        (root / name).touch()
    train, val = index_of(*options)
    assert [paths_in(train), paths_in(val)] == before
    told = "\n".join(train.notes)
    assert all(text in told for text in ("3 files", "2 .heic", "1 no ending"))
    next(root.glob("c/*")).rename(root / "c" / "phone.JFIF")
    assert sum(map(len, index_of(*options))) == 12


SPLIT = {f"{split}/{name}/1.png": 8 for split in ("train", "val") for name in "ab"}


UNPAIRED = {"target/99.png": 8} | {f"input/{number:02d}.png": 8 for number in range(13)}
PAIRED = {"input/a.png": 8, "target/a.png": 8, "input/b.png": 8, "target/b.png": 9}


@pytest.mark.parametrize(
    ("layout", "widths", "shown"),
    [
        ("data=imagefolder", {"a/1.png": 8, "b/.hidden.png": 8}, ["1 class folder ", ": b;"]),
        ("data=imagefolder", {"set/0/1.png": 8, "set/1/1.png": 8}, ["/d/set holds", "data.root"]),
        ("data=imagefolder", {"a/1.png": 8}, ["1 class (a)"]),
        ("data=imagefolder", {"Train/a/1.png": 8, "train/a/1.png": 8}, ["Train and train"]),
        (
            "data=imagefolder",
            {"train/a/1.png": 8, "b/1.png": 8},
            ["d has train;", "such as train and val"],
        ),
        ("data=imagefolder", SPLIT, ["data.val_count=1"]),
        *rows(
            ("data=pairs", UNPAIRED, ["14 images", "partner", "01.png", "8 more"]),
            ("data=pairs", PAIRED, ["1 pair ", "b.png (8x8)", "(8x9)"]),
        ),
    ],
)
def test_bad_folders_are_refused_with_names(layout, widths, shown, tmp_path: Path) -> None:
    for name, width in widths.items():
        save(tmp_path / "d" / name, smooth(0, 8, width))
    with refused(*shown):
        index_of(*reading(tmp_path / "d"), layout, "data.val_count=1")
