"""Headers are read once, and an index on disk is shared by processes."""

import os
import pickle
import shutil
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.check import check
from loaders.index import share
from tests.helpers import REPOSITORY, make_config, refused
from tests.images import index_of, loaders_of, make_photos, paths_in, photos_in, rot, save, smooth


def test_embedded_digits_are_the_promised_subset() -> None:
    train, val = index_of()
    labels: Any = train.target
    assert (len(train), len(val)) == (10_000, 2_000)
    assert labels.classes == tuple("0123456789")
    assert labels.values[:5].tolist() == [5, 0, 4, 1, 9]
    assert check(make_config().data) == (12_000, {})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 12)


def options_for(photos: Path, *more: str) -> list[str]:
    return photos_in(photos, "data.crop=[16,16]", "data.val_count=4", *more)


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


def test_workers_map_an_index_into_memory(photos: Path) -> None:
    for options in (options_for(photos), [f"data.cache_dir={photos.parent / 'cache'}"]):
        for index in index_of(*options):
            image, path = index.read(0), index.source.name(0)
            share(index, make_config(*options).data)
            call = ForkingPickler.dumps(index)
            assert len(call) < 1000  # of columns, it has the folder
            found: Any = pickle.loads(call)  # as in a worker process
            assert found.sizes.tolist() == index.sizes.tolist()
            assert np.array_equal(found.read(0), image)
            assert (found.source.name(0), found.fingerprint) == (path, index.fingerprint)


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
    command_line = [*unshare, "sh", sys.executable, "-c", command]
    for is_complete in (True, False):
        if not is_complete:
            shutil.copy(photos / "a" / "foto ä 0.jpg", photos / "a" / "new.jpg")
        found = subprocess.run(command_line, cwd=REPOSITORY, capture_output=True, text=True)
        assert (found.stdout.split() == ["8", "4"]) == is_complete, found.stderr
        assert ("data.cache_dir" in found.stderr) != is_complete
