"""Where the samples come from, how they become files once, and how they are indexed on disk."""

import mmap
import os
import pickle
import shutil
import sys
from dataclasses import replace
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.schema import DataConfig
from loaders.index import SPLITS, BadFileError, images_below, open_splits, read_headers, share
from tests.helpers import join, make_config, refused, start_process
from tests.images import index_of, loaders_of, make_photos, photos_in, rot, save, save_index, smooth

COUNT = 12


def test_embedded_digits_are_the_promised_subset() -> None:
    train, val = index_of()
    labels: Any = train.target
    assert (len(train), len(val)) == (10_000, 2_000)
    assert labels.classes == tuple("0123456789")
    assert labels.values[:5].tolist() == [5, 0, 4, 1, 9]
    assert labels.class_counts().min() > 800


def test_other_labels_or_pixels_are_another_data_set() -> None:
    train: Any = index_of()[0]
    labels = replace(train.target, values=train.target.values[::-1])
    others = [replace(train, target=labels), replace(train, pixels=(train.pixels[0][::-1],))]
    assert train.fingerprint not in [other.fingerprint for other in others]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", COUNT)


def options_for(photos: Path, *more: str) -> list[str]:
    return photos_in(photos, "data.crop=[16,16]", "data.val_count=4", *more)


def data_of(photos: Path) -> DataConfig:
    return make_config(*options_for(photos)).data


def sizes_of(photos: Path, *more: str) -> dict[str, tuple[int, int]]:
    """Height and width by file, as a new index has them."""
    sizes: dict[str, tuple[int, int]] = {}
    for index in index_of(*options_for(photos, *more)):
        names = [Path(name).name for name in index.files[0]]
        sizes |= zip(names, map(tuple, index.sizes.tolist()), strict=True)
    return sizes


def test_only_files_that_are_new_or_changed_are_read_again(photos: Path) -> None:
    sizes = sizes_of(photos)
    assert sizes["foto ä 4.jpg"] == (64, 80)
    for path in images_below(photos):  # whoever reads one of them fails
        rot(path)
    save(photos / "a" / "new.jpg", smooth(0, 9, 8))
    save(photos / "b" / "foto ä 1.jpg", smooth(0, 11, 10))
    (photos / "a" / "foto ä 0.jpg").unlink()
    del sizes["foto ä 0.jpg"]
    sizes["new.jpg"] = (9, 8)
    read_headers([str(photos / "a" / "new.jpg")], data_of(photos), "rgb")  # the others are kept
    assert sizes_of(photos, "data.check_files=false") == sizes  # known files are not looked at
    sizes["foto ä 1.jpg"] = (11, 10)
    assert sizes_of(photos) == sizes

    (photos / "a" / "page.jpg").write_text("<html>")
    shutil.copy(photos / "a" / "new.jpg", photos / "a" / "newer.jpg")
    with refused("1 of 14 files"):
        sizes_of(photos)
    (photos / "a" / "page.jpg").unlink()
    rot(str(photos / "a" / "newer.jpg"))  # known, though the scan before ended with an error
    assert sizes_of(photos) == sizes | {"newer.jpg": (9, 8)}

    [kept] = (cache := photos.with_name("cache")).glob("headers-*.npy")
    kept.write_bytes(kept.read_bytes()[:-100])
    with refused("11 of 13 files"):
        sizes_of(photos)
    shutil.rmtree(cache)
    cache.touch()
    with refused(f"data.cache_dir={cache} "):
        sizes_of(photos)


# An index on disk. That it is the one made by reading the data set, is in test_contract.py.


@pytest.fixture
def out(photos: Path, tmp_path: Path) -> Path:
    """An index of the photos."""
    save_index(data_of(photos), tmp_path / "index")
    return tmp_path / "index"


def is_mapped(array: Any) -> bool:
    """Whether an array lies in a file, whose memory all processes share."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def test_workers_map_an_index_into_memory_and_the_data_may_move(photos, out, tmp_path) -> None:
    made, opened = (index_of(*options_for(photos, *x)) for x in ([], [f"data.index={out}"]))
    for split, index, other in zip(SPLITS, opened, made, strict=True):
        assert index.stored  # whose fingerprint is known, not worked out again
        for mapped in (index, share(other, tmp_path / "made" / split)):
            call = ForkingPickler.dumps(mapped)
            assert len(call) < 1000
            found = pickle.loads(call)  # as in a worker process
            columns = [found.sizes, *found.headers, *(paths.names for paths in found.files)]
            assert all(map(is_mapped, columns))
            assert found.sizes.tolist() == other.sizes.tolist()
    moved = photos.rename(tmp_path / "moved")
    train, _ = loaders_of(*options_for(moved, f"data.index={out}"))
    assert train.index.name_of(0).startswith(str(moved))
    assert sum(len(inputs) for inputs, _ in train) == COUNT - 4
    assert train.state_dict()["plan"]["files"] == made[0].fingerprint


def test_a_file_that_changed_or_is_gone_is_named_at_start_or_when_it_is_read(photos, out) -> None:
    *changed, gone = map(Path, images_below(photos))
    for path in changed:
        save(path, smooth(0, 66, 80))
    gone.unlink()
    options = options_for(photos, f"data.index={out}")
    with refused("samples of photos/", " has changed ", "loaders.index"):
        index_of(*options)
    index_of(*options, "data.on_error=skip")
    hidden = photos.rename(photos.with_name("hidden"))
    both = loaders_of(*options, "data.check_files=false")  # looks at no file
    hidden.rename(photos)
    for loader in both:
        with pytest.raises(BadFileError, match=f"{photos}.*(has changed|No such file)"):
            list(loader)


def be_killed(photos: Path) -> None:
    """Read the headers of photos, three at a time, until the eighth of them is opened."""
    opened = count()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".jpg") and next(opened) == 7:
            os._exit(9)

    sys.addaudithook(audit)
    read_headers(images_below(photos), data_of(photos), "rgb", at_once=3)


def test_an_indexing_that_was_killed_goes_on(photos: Path, tmp_path: Path) -> None:
    data, files = data_of(photos), images_below(photos)
    assert join([start_process(be_killed, photos)]) == [9]
    for path in files[:6]:  # which are not read again
        rot(path)
    (out := tmp_path / "index").mkdir()  # an empty folder is as good as none
    save_index(data, out)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["cache", "index", "photos"]
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1
    Path(files[6]).write_text("no image")
    with refused("1 of 12 files"):
        save_index(data, out)
    data.index, data.check_files = str(out), False
    assert sum(map(len, open_splits(data))) == COUNT  # the one from before


def test_an_index_of_other_settings_or_of_no_files_is_refused(photos: Path, out: Path) -> None:
    with refused("data.val_count=3 (there: 4)"):
        index_of(*options_for(photos, "data.val_count=3", f"data.index={out}"))
    with refused("data=mnist_mini"):
        save_index(make_config().data, out.with_name("new"))
    assert not out.with_name("new").exists()
