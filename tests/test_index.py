"""Where the samples come from, how they become files once, and how they are indexed on disk."""

import mmap
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.schema import DataConfig
from loaders.columns import stored
from loaders.folders import images_below
from loaders.headers import read_headers
from loaders.index import new_index
from loaders.pixels import Pixels
from tests.helpers import REPOSITORY, join, make_config, refused, start_process
from tests.images import (
    index_of,
    loaders_of,
    make_photos,
    paths_in,
    photos_in,
    rot,
    save,
    smooth,
)

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
    source = train.source
    pixels = Pixels(source.sizes, source.offsets, (source.pixels[0][::-1],))
    made = [
        new_index(train.name, train.sizes, target, train.inputs, images)
        for target, images in ((train.target, source), (labels, source), (train.target, pixels))
    ]
    assert made[0].fingerprint == train.fingerprint
    assert len({index.fingerprint for index in made}) == 3


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
        names = [Path(name).name for name in paths_in(index)]
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


# The copy of an index for worker processes.


def is_mapped(array: Any) -> bool:
    """Whether an array lies in a file, whose memory all processes share."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def test_workers_map_an_index_into_memory(photos: Path) -> None:
    for options in (options_for(photos), [f"data.cache_dir={photos.parent / 'cache'}"]):
        data = make_config(*options).data
        for index in index_of(*options):
            mapped = stored(index, data)
            call = ForkingPickler.dumps(mapped)
            assert len(call) < 1000
            found: Any = pickle.loads(call)  # as in a worker process
            columns = found.source.columns().values()
            assert all(map(is_mapped, [found.sizes, *columns]))
            assert found.sizes.tolist() == index.sizes.tolist()
            assert np.array_equal(found.read(0), index.read(0))
            assert found.fingerprint == index.fingerprint


def test_a_complete_cache_that_is_only_read_is_used(photos: Path) -> None:
    cache, options = photos.with_name("cache"), options_for(photos, "loader.num_workers=1")
    for loader in loaders_of(*options):
        list(loader)
    command = f"""
from tests.images import loaders_of
for loader in loaders_of(*{options!r}):
    print(sum(len(inputs) for inputs, _ in loader))
"""
    mount = f'mount --bind "{cache}" "{cache}" && mount -o remount,ro,bind "{cache}" && exec "$@"'
    unshare = ["unshare", *([] if os.geteuid() == 0 else ["-Ur"]), "--mount", "sh", "-c", mount]
    found = subprocess.run(
        [*unshare, "sh", sys.executable, "-c", command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["8", "4"], found.stderr
    photos.joinpath("a", "new.jpg").write_bytes(photos.joinpath("a", "foto ä 0.jpg").read_bytes())
    found = subprocess.run(
        [*unshare, "sh", sys.executable, "-c", command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert "data.cache_dir" in found.stderr


def be_killed(photos: Path) -> None:
    """Read the headers of photos, three at a time, until the eighth of them is opened."""
    opened = count()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".jpg") and next(opened) == 7:
            os._exit(9)

    sys.addaudithook(audit)
    read_headers(images_below(photos), data_of(photos), "rgb", at_once=3)


def test_an_indexing_that_was_killed_goes_on(photos: Path, tmp_path: Path) -> None:
    files = images_below(photos)
    assert join([start_process(be_killed, photos)]) == [9]
    for path in files[:6]:  # which are not read again
        rot(path)
    assert sum(map(len, index_of(*options_for(photos)))) == COUNT
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1
