"""An index on disk equals the one made by reading the data set, and is enough to start from."""

import mmap
import pickle
import shutil
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.image_loaders import build_loaders
from loaders.index import (
    DATASETS,
    SPLITS,
    BadFileError,
    Index,
    build_index,
    images_below,
    kept_headers,
    share,
)
from loaders.index import write_index as write_indexes
from loaders.targets import describe_target
from tests.helpers import make_config
from tests.images import KINDS, NUM_TRAIN, NUM_VAL, make_photos, opening, reading, save, smooth

CPU = torch.device("cpu")
COUNT = 12
ONE_OF_EACH_LAYOUT = ("photos", "numbers", "pairs", "masks", "cells of 8 bits, not compressed")


def options_of(root: Path, num_val: int) -> list[str]:
    """Overrides that read the data set in this folder."""
    return reading(root, "data.crop=[16,16]", f"data.val_count={num_val}")


def write_index(data: DataConfig, out: Path) -> None:
    write_indexes(dict(zip(SPLITS, DATASETS[data.layout](data), strict=True)), data, out)


def facts_of(index: Index) -> list[Any]:
    names = ("name", "channels", "dtype", "keep_channels", "resized", "left_out", "sides", "is_raw")
    arrays = [index.sizes, index.distinct_sizes, *index.headers]
    arrays += [getattr(index.target, "values", np.zeros(0))]
    facts = [getattr(index, name) for name in (*names, "fingerprint")]
    return [
        *facts,
        describe_target(index.target),
        [list(paths) for paths in index.files],
        [array.tolist() for array in arrays],
    ]


def is_mapped(array: Any) -> bool:
    """Whether an array lies in a file, whose memory all processes share."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


@pytest.mark.parametrize("kind", [kind for kind in ONE_OF_EACH_LAYOUT if kind in KINDS])
def test_it_is_the_index_that_the_layout_makes_also_when_the_data_has_moved(
    kind: str, tmp_path: Path
) -> None:
    root, out = tmp_path / "images", tmp_path / "index"
    options = [*KINDS[kind](root).options, *options_of(root, NUM_VAL), "global_batch_size=4"]
    made = build_index(make_config(*options).data)
    write_index(make_config(*options).data, out)
    opened = build_index(make_config(*options, f"data.index={out}").data)
    for split, index, other in zip(SPLITS, opened, made, strict=True):
        assert "fingerprint" in vars(index)  # known, not worked out again
        assert facts_of(index) == facts_of(other)
        for mapped in (index, share(other, tmp_path / "made" / split)):
            call = ForkingPickler.dumps(mapped)
            assert len(call) < 1000
            found = pickle.loads(call)  # as in a worker process
            assert facts_of(found) == facts_of(other)
            columns = [found.sizes, *found.headers, *(paths.names for paths in found.files)]
            assert all(map(is_mapped, columns))
    moved = shutil.move(root, tmp_path / "elsewhere" / "images")
    options += [f"data.root={moved}", f"data.index={out}"]
    train, _ = build_loaders(make_config(*options), CPU)
    assert train.index.name_of(0).startswith(str(moved))
    assert sum(len(inputs) for inputs, _ in train) == NUM_TRAIN - NUM_TRAIN % 4
    assert train.state_dict()["plan"]["files"] == made[0].fingerprint


class Photos:
    """Twelve photos, and an index of them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.out = make_photos(folder / "photos", COUNT), folder / "index"
        self.options = [*options_of(self.root, 3), "data=imagefolder", "data.resize=null"]
        self.options += ["global_batch_size=3"]
        self.data = self.config().data
        write_index(self.data, self.out)

    def config(self, *more: str) -> Any:
        return make_config(*self.options, *more)

    def indexed(self, *more: str) -> Sequence[Index]:
        return build_index(self.config(f"data.index={self.out}", *more).data)

    def change(self, number: int) -> Path:
        path = self.root / "abc"[number % 3] / f"foto ä {number}.jpg"
        save(path, smooth(number + 1, 61, 80))
        return path


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    return Photos(tmp_path)


@pytest.mark.parametrize("loader", ["pytorch", "dali"])
def test_a_start_without_a_look_at_files_names_one_that_changed_when_it_is_read(
    loader: str, photos: Photos
) -> None:
    changed = photos.change(0)
    hidden = photos.root.rename(photos.root.with_name("hidden"))
    options = [f"data.index={photos.out}", "data.check_files=false", f"loader={loader}"]
    both = build_loaders(photos.config(*options), CPU)
    hidden.rename(photos.root)
    with pytest.raises(BadFileError, match=f"{changed} has changed"):
        for each in both:
            list(each)


def test_a_file_that_changed_or_is_gone_is_named_at_start(photos: Photos) -> None:
    for number in range(COUNT - 1):
        photos.change(number)
    photos.change(COUNT - 1).unlink()
    with pytest.raises(UserError, match="samples of photos/.* has changed .*loaders.index"):
        photos.indexed()
    photos.indexed("data.on_error=skip")  # and leaves them out when read


# part: header_cache
@pytest.mark.parametrize("kind", [kind for kind in ("pairs", "masks") if kind in KINDS])
def test_headers_of_both_sides_are_read_once(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "images"
    data = make_config(*KINDS[kind](root).options, *options_of(root, NUM_VAL)).data
    for num_read in (2 * (NUM_VAL + NUM_TRAIN), 0):
        read: set[str] = set()
        with opening(read.add):
            build_index(data)
        assert len([path for path in read if path.startswith(str(root))]) == num_read


def test_known_files_are_not_looked_at_where_no_index_is_given(photos: Photos) -> None:
    before = build_index(photos.data)
    photos.change(0).write_text("no image")
    photos.change(COUNT)
    after = build_index(photos.config("data.check_files=false").data)
    assert sum(map(len, after)) == sum(map(len, before)) + 1
    with pytest.raises(UserError, match="1 of 13 files"):
        build_index(photos.data)


def test_an_indexing_that_was_stopped_goes_on_and_leaves_nothing_behind(tmp_path: Path) -> None:
    root, cache = make_photos(tmp_path / "photos", COUNT), tmp_path / "cache"
    data = make_config("data=imagefolder", *options_of(root, 3)).data
    files, read = images_below(root), list[str]()

    def listen(path: str) -> None:
        if path.endswith(".jpg"):
            if len(read) == 7:
                raise KeyboardInterrupt
            read.append(path)

    with pytest.raises(KeyboardInterrupt), opening(listen):
        kept_headers(files, data, "rgb", at_once=3)
    assert read == files[:7]
    read.clear()
    with opening(listen):
        (out := tmp_path / "index").mkdir()  # an empty folder is as good as none
        write_index(data, out)
    assert read == files[6:]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["cache", "index", "photos"]
    assert len(list(cache.glob("*.npy"))) == 1
    Path(files[0]).write_text("no image")
    with pytest.raises(UserError, match="1 of 12 files"):
        write_index(data, out)
    data.index, data.check_files = str(out), False
    assert sum(map(len, build_index(data))) == COUNT  # the one from before


def test_an_index_that_is_in_use_is_replaced_and_its_user_goes_on(photos: Photos) -> None:
    before, _ = photos.indexed()
    names = list(before.files[0])
    make_photos(photos.root / "b", COUNT)
    write_index(photos.data, photos.out)
    assert list(before.files[0]) == names
    assert sum(map(len, photos.indexed())) == 2 * COUNT


def test_what_is_no_fitting_index_is_refused(photos: Photos, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.val_count=4 \(there: 3\)"):
        photos.indexed("data.val_count=4")
    with pytest.raises(UserError, match="is not an index.*python -m loaders.index"):
        photos.indexed(f"data.index={photos.root}")
    with pytest.raises(UserError, match="out=DIR"):
        write_index(photos.data, photos.root)
    with pytest.raises(UserError, match="data=mnist_mini"):
        write_index(make_config().data, tmp_path / "new")
    assert not (tmp_path / "new").exists()
