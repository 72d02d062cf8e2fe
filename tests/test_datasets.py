"""Which files of a folder are samples, of which split, and what is kept of their headers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.check import check
from loaders.index import Index
from loaders.layouts import open_index
from loaders.targets import describe_target
from tests.helpers import REPOSITORY, make_config, refused
from tests.images import (
    index_of,
    loaders_of,
    make_photos,
    paths_in,
    photos_in,
    reading,
    rot,
    save,
    smooth,
)
from tests.kinds import KINDS
from tests.rows import rows


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """12 photos in three class folders."""
    return make_photos(tmp_path / "photos", 12)


SPLITS = [("Train", "Val"), ("training", "testing"), ("train_set", "dev")]


@pytest.mark.parametrize("names", SPLITS)
@pytest.mark.parametrize(
    ("layout", "classes"),
    [("data=imagefolder", 2), *rows(("data=pairs", 1))],
)
def test_folders_of_splits_have_any_usual_spelling(names, layout, classes, tmp_path) -> None:
    for name, count in zip(names, (2, 1), strict=True):
        for number in range(count):
            for folder in ("input", "target"):  # classes, too
                save(tmp_path / "d" / name / folder / f"{number}.png", smooth(number, 8, 8))
    train, val = index_of(layout, *reading(tmp_path / "d"))
    assert [len(train), len(val)] == [2 * classes, classes]
    for index, name in ((train, names[0]), (val, names[1])):
        assert {Path(path).parts[-3] for path in paths_in(index)} == {name}


def test_names_are_read_in_any_locale(tmp_path: Path) -> None:
    """Of files below folders, and in a table."""
    names, table = ["b/1.png", "\u00c4/\u00e9.png"], tmp_path / "labels.csv"
    for name in names:
        save(tmp_path / "d" / name, smooth(0, 8, 8))
    table.write_text("\n".join(["path,label", *(f"{name},{name[0]}" for name in names)]), "utf-8")
    layouts = [["data=imagefolder"], *rows(["data=table", f"data.table={table}"])]
    command = [sys.executable, "-m", "loaders.check", *layouts[-1], *reading(tmp_path / "d")]
    command += ["data.val_count=1", f"out={tmp_path / 'bad.txt'}"]
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    printed = subprocess.check_output(command, cwd=REPOSITORY, env=env, text=True)
    assert "decoded 2 files" in printed


def test_a_run_goes_on_with_data_in_a_renamed_folder(photos: Path) -> None:
    plans = [loader.state_dict()["plan"] for loader in loaders_of(*photos_in(photos))]
    photos = photos.rename(photos.with_name("other"))
    assert [loader.state_dict()["plan"] for loader in loaders_of(*photos_in(photos))] == plans
    (photos / "a" / "foto ä 0.jpg").rename(photos / "a" / "other.jpg")
    assert [loader.state_dict()["plan"] for loader in loaders_of(*photos_in(photos))] != plans


def test_system_folders_are_skipped_and_other_endings_are_counted(photos: Path) -> None:
    root, options = photos, photos_in(photos)
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
    (photos / "a").rename(photos / "train")  # a class may be called so
    target: Any = index_of(*options)[0].target
    assert target.classes == ("b", "c", "train")


IN_SPLITS = {f"{split}/{name}/1.png": 8 for split in ("train", "val") for name in "ab"}
UNPAIRED = {"target/99.png": 8} | {f"input/{number:02d}.png": 8 for number in range(13)}
PAIRED = {"input/a.png": 8, "target/a.png": 8, "input/b.png": 8, "target/b.png": 9}


@pytest.mark.parametrize(
    ("layout", "widths", "shown"),
    [
        ("data=imagefolder", {"a/1.png": 8, "b/.hidden.png": 8}, ["1 class folder ", ": b;"]),
        ("data=imagefolder", {"a/1.png": 8}, ["1 class (a)"]),
        ("data=imagefolder", {"Train/a/1.png": 8, "train/a/1.png": 8}, ["Train and train"]),
        (
            "data=imagefolder",
            {"train/a/1.png": 8, "b/1.png": 8},
            ["d has train;", "such as train and val"],
        ),
        ("data=imagefolder", IN_SPLITS, ["data.val_count=1"]),
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


def splits_of(*overrides: str) -> dict[str, Index]:
    """The index of each split."""
    return open_index(make_config(*overrides).data, ("train", "val", "test"))


def folds_of(*options: str) -> list[tuple[Index, Index]]:
    return [index_of(*options, f"data.fold={k}", "data.num_folds=3") for k in range(3)]


def names_of(*indexes: Index) -> set[str]:
    return {path for index in indexes for path in paths_in(index)}


@pytest.mark.parametrize("kind", [kind for kind in ("photos", "masks") if kind in KINDS])
def test_training_does_not_look_at_the_test_split(kind: str, tmp_path: Path) -> None:
    """Which may be broken."""
    root = tmp_path / "data"
    for split in ("train", "val", "test"):
        data = KINDS[kind](root / split)
    options = [*data.options, *reading(root), "data.crop=[32,32]", "global_batch_size=4"]
    train, val, test = splits_of(*options).values()
    assert len(test)
    assert not names_of(test) & names_of(train, val)
    assert describe_target(test.target) == describe_target(train.target)
    with refused("data.fold=0", "validation split"):
        index_of(*options, "data.fold=0")
    shutil.rmtree(root / "val")
    assert splits_of(*options, "data.fold=0")["test"].fingerprint == test.fingerprint
    for path in names_of(test):
        Path(path).write_bytes(b"no image")
    for fold in folds_of(*options):
        assert names_of(*fold) == names_of(train)
        assert all(describe_target(one.target) == describe_target(train.target) for one in fold)


def test_without_val_test_validates_and_is_no_test_split(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for split, count in (("train", 9), ("test", 6)):
        make_photos(root / split, count)
    options = photos_in(root)

    def sizes_of(*more: str) -> dict[str, int]:
        return {split: len(index) for split, index in splits_of(*options, *more).items()}

    assert sizes_of() == {"train": 9, "val": 6}
    assert sizes_of(f"data.root={root / 'train'}") == {"train": 8, "val": 1}
    in_folds = sizes_of("data.fold=0", "data.num_folds=3")
    assert in_folds == {"train": 6, "val": 3, "test": 6}
    make_photos(root / "val", 3)
    assert sizes_of() == {"train": 9, "val": 3, "test": 6}


# A kind of each sort of targets.
FOLDED = ["photos", "pairs", "several labels", "numbers"]


@pytest.mark.parametrize("kind", [kind for kind in FOLDED if kind in KINDS])
def test_folds_are_disjoint_cover_the_data_and_keep_class_shares(kind: str, tmp_path: Path) -> None:
    options = [*KINDS[kind](tmp_path / "data").options, *reading(tmp_path / "data")]
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


def test_embedded_digits_are_the_promised_subset() -> None:
    train, val = index_of()
    labels: Any = train.target
    assert (len(train), len(val)) == (10_000, 2_000)
    assert labels.classes == tuple("0123456789")
    assert labels.values[:5].tolist() == [5, 0, 4, 1, 9]
    assert check(make_config().data) == (12_000, {})


def sizes_of(photos: Path) -> dict[str, tuple[int, int]]:
    """Height and width by file, as a new index has them."""
    sizes: dict[str, tuple[int, int]] = {}
    for index in index_of(*photos_in(photos, "data.val_count=4")):
        names = [Path(name).name for name in paths_in(index)]
        sizes |= zip(names, map(tuple, index.sizes.tolist()), strict=True)
    return sizes


def test_only_files_that_are_new_or_changed_are_read_again(photos: Path) -> None:
    sizes = sizes_of(photos)
    assert sizes["foto ä 4.jpg"] == (64, 80)
    for path in map(str, photos.rglob("*.jpg")):  # whoever reads one of them fails
        rot(path)
    save(photos / "a" / "new.jpg", smooth(0, 9, 8))
    save(photos / "b" / "foto ä 1.jpg", smooth(0, 11, 10))
    (photos / "a" / "foto ä 0.jpg").unlink()
    del sizes["foto ä 0.jpg"]
    sizes["new.jpg"] = (9, 8)
    sizes["foto ä 1.jpg"] = (11, 10)
    assert sizes_of(photos) == sizes

    [kept] = (cache := photos.with_name("cache")).glob("headers-*/headers.npy")
    kept.write_bytes(kept.read_bytes()[:-100])
    with refused("10 of 12 files"):
        sizes_of(photos)
    shutil.rmtree(cache)
    cache.touch()
    with refused(f"{cache}/headers-", "data.cache_dir"):
        sizes_of(photos)


def test_a_complete_cache_that_is_only_read_is_used(photos: Path) -> None:
    options = photos_in(photos, "data.val_count=4", "loader.num_workers=1")
    cache = str(photos.with_name("cache"))
    for loader in loaders_of(*options):
        list(loader)
    if subprocess.run(["mount", "--bind", cache, cache], capture_output=True).returncode != 0:
        pytest.skip("mounting a folder is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", cache], check=True)
        for loader, count in zip(loaders_of(*options), (8, 4), strict=True):
            assert sum(len(inputs) for inputs, _ in loader) == count
        shutil.copy(photos / "a" / "foto ä 0.jpg", photos / "a" / "new.jpg")
        with refused("data.cache_dir"):
            loaders_of(*options)
    finally:
        subprocess.run(["umount", "-l", cache], check=True)
