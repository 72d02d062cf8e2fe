"""Where the samples come from, how they become files once, and how they are indexed on disk."""

import mmap
import pickle
import shutil
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from conf.schema import Config, DataConfig
from loaders.image_loaders import build_loaders
from loaders.index import (
    SPLITS,
    BadFileError,
    build_index,
    images_below,
    kept_headers,
    share,
    write_index,
)
from loaders.read import read_image
from loaders.targets import Labels
from tests.helpers import make_config, refused
from tests.images import make_photos, opening, reading, save, smooth

CPU = torch.device("cpu")
COUNT = 12


def test_embedded_digits_are_the_promised_subset() -> None:
    train, val = build_index(make_config().data)
    assert (len(train), len(val)) == (10_000, 2_000)
    assert isinstance(train.target, Labels)
    assert train.target.classes == tuple("0123456789")
    assert train.target.values[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(train.target.values).min() > 800
    assert read_image(train, 9_999).shape == (28, 28, 1)


DIGITS = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)


def write_mnist(raw: Path) -> None:
    """The four files of MNIST, of two digits each."""
    raw.mkdir(parents=True, exist_ok=True)
    for split in ("train", "t10k"):
        for kind, array in (("images-idx3", DIGITS), ("labels-idx1", np.array([3, 7], np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (raw / f"{split}-{kind}-ubyte").write_bytes(header + array.tobytes())


@pytest.mark.usefixtures("no_downloads")
def test_mnist_without_a_download_says_where_to_put_the_files(tmp_path) -> None:
    data, raw = make_config("data=mnist", f"data.root={tmp_path}").data, tmp_path / "MNIST/raw"
    with pytest.raises(UserError) as error:
        build_index(data)
    [line] = str(error.value).splitlines()  # of more, the last ones are not shown
    assert all(part in line for part in (f"{raw} ", "train-images-idx3-ubyte", "unpacked"))
    write_mnist(raw)
    train, val = build_index(data)
    assert isinstance(val.target, Labels)
    assert np.array_equal([read_image(train, n)[..., 0] for n in range(2)], DIGITS)
    assert val.target.values.tolist() == [3, 7]
    (raw / "t10k-images-idx3-ubyte").write_bytes(bytes(100))
    with refused(f"MNIST in {raw} cannot be read"):
        build_index(data)


def test_caltech256_is_unpacked_once(tmp_path, monkeypatch) -> None:
    from torchvision.datasets import utils

    attempts = []

    def unpack(url: str, folder: Path, unpacked: Path, filename: str, md5: str) -> None:
        attempts.append(unpacked)
        for name in ("001.a/1", "001.a/2", "002.b/1", "002.b/2"):
            image = unpacked / filename.removesuffix(".tar") / f"{name}.jpg"
            save(image, smooth(0, 20, 30))

    monkeypatch.setattr(utils, "download_and_extract_archive", unpack)
    options = ["data=caltech256", f"data.root={tmp_path / 'root'}", f"data.cache_dir={tmp_path}"]
    data = make_config(*options, "data.val_count=1").data
    assert [sum(map(len, build_index(data))) for _ in range(2)] == [4, 4]
    assert len(attempts) == 1
    assert [path.name for path in (tmp_path / "root/caltech256").iterdir()] == [
        "256_ObjectCategories"
    ]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", COUNT)


def config_of(photos: Path, *more: str) -> Config:
    options = ["data=imagefolder", "data.resize=null", "data.crop=[16,16]", "data.val_count=3"]
    return make_config(*options, "global_batch_size=3", *reading(photos), *more)


def scan(photos: Path) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Height and width by file; and the files whose headers were read."""
    read: set[str] = set()
    with opening(read.add):
        indexes = build_index(config_of(photos).data)
    sizes: dict[str, tuple[int, int]] = {}
    for index in indexes:
        names = [Path(name).name for name in index.files[0]]
        sizes |= zip(names, map(tuple, index.sizes.tolist()), strict=True)
    return sizes, {Path(path).name for path in read if path.startswith(str(photos))}


# part: header_cache
def test_only_files_that_are_new_or_changed_are_read_again(photos: Path) -> None:
    sizes, read = scan(photos)
    assert read == set(sizes)
    assert sizes["foto ä 4.jpg"] == (64, 80)
    assert scan(photos) == (sizes, set())

    save(photos / "a" / "new.jpg", smooth(0, 9, 8))
    save(photos / "b" / "foto ä 1.jpg", smooth(0, 11, 10))
    (photos / "a" / "foto ä 0.jpg").unlink()
    sizes |= {"new.jpg": (9, 8), "foto ä 1.jpg": (11, 10)}
    del sizes["foto ä 0.jpg"]
    assert scan(photos) == (sizes, {"new.jpg", "foto ä 1.jpg"})

    (photos / "a" / "page.jpg").write_text("<html>")
    shutil.copy(photos / "a" / "new.jpg", photos / "a" / "newer.jpg")
    with refused("1 of 14 files"):
        scan(photos)
    (photos / "a" / "page.jpg").unlink()
    sizes["newer.jpg"] = (9, 8)
    assert scan(photos) == (sizes, set())  # though the scan before ended with an error

    [kept] = photos.with_name("cache").glob("headers-*.npy")
    kept.write_bytes(kept.read_bytes()[:-100])
    assert scan(photos) == (sizes, set(sizes))
    kept.unlink()
    assert scan(photos) == (sizes, set(sizes))
    assert kept.exists()


def test_a_cache_folder_that_cannot_be_written_to_is_done_without(photos: Path, caplog) -> None:
    photos.with_name("cache").touch()
    assert len(scan(photos)[0]) == COUNT
    assert "data.cache_dir" in caplog.text


# An index on disk. That it is the one made by reading the data set, is in test_contract.py.


def write(data: DataConfig, out: Path) -> None:
    write_index(dict(zip(SPLITS, build_index(data), strict=True)), data, out)


@pytest.fixture
def out(photos: Path, tmp_path: Path) -> Path:
    """An index of the photos."""
    write(config_of(photos).data, tmp_path / "index")
    return tmp_path / "index"


def change(photos: Path, number: int) -> Path:
    path = photos / "abc"[number % 3] / f"foto ä {number}.jpg"
    save(path, smooth(number + 1, 61, 80))
    return path


def is_mapped(array: Any) -> bool:
    """Whether an array lies in a file, whose memory all processes share."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def test_workers_map_an_index_into_memory_and_the_data_may_move(
    photos: Path, out: Path, tmp_path: Path
) -> None:
    made = build_index(config_of(photos).data)
    opened = build_index(config_of(photos, f"data.index={out}").data)
    for split, index, other in zip(SPLITS, opened, made, strict=True):
        assert "fingerprint" in vars(index)  # known, not worked out again
        for mapped in (index, share(other, tmp_path / "made" / split)):
            call = ForkingPickler.dumps(mapped)
            assert len(call) < 1000
            found = pickle.loads(call)  # as in a worker process
            columns = [found.sizes, *found.headers, *(paths.names for paths in found.files)]
            assert all(map(is_mapped, columns))
            assert found.sizes.tolist() == other.sizes.tolist()
    moved = photos.rename(tmp_path / "moved")
    train, _ = build_loaders(config_of(moved, f"data.index={out}"), CPU)
    assert train.index.name_of(0).startswith(str(moved))
    assert sum(len(inputs) for inputs, _ in train) == COUNT - 3
    assert train.state_dict()["plan"]["files"] == made[0].fingerprint


@pytest.mark.parametrize("loader", ["pytorch", "dali"])
def test_a_start_without_a_look_at_files_names_one_that_changed_when_it_is_read(
    loader: str, photos: Path, out: Path
) -> None:
    changed = change(photos, 0)
    hidden = photos.rename(photos.with_name("hidden"))
    options = [f"data.index={out}", "data.check_files=false", f"loader={loader}"]
    both = build_loaders(config_of(photos, *options), CPU)
    hidden.rename(photos)
    with pytest.raises(BadFileError, match=f"{changed} has changed"):
        for each in both:
            list(each)


def test_a_file_that_changed_or_is_gone_is_named_at_start(photos: Path, out: Path) -> None:
    for number in range(COUNT - 1):
        change(photos, number)
    change(photos, COUNT - 1).unlink()
    with refused("samples of photos/", " has changed ", "loaders.index"):
        build_index(config_of(photos, f"data.index={out}").data)
    build_index(config_of(photos, f"data.index={out}", "data.on_error=skip").data)


def test_known_files_are_not_looked_at_where_no_index_is_given(photos: Path) -> None:
    before = build_index(config_of(photos).data)
    change(photos, 0).write_text("no image")
    change(photos, COUNT)
    after = build_index(config_of(photos, "data.check_files=false").data)
    assert sum(map(len, after)) == sum(map(len, before)) + 1
    with refused("1 of 13 files"):
        build_index(config_of(photos).data)


def test_an_indexing_that_was_stopped_goes_on_and_leaves_nothing_behind(
    photos: Path, tmp_path: Path
) -> None:
    data, files, read = config_of(photos).data, images_below(photos), list[str]()

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
        write(data, out)
    assert read == files[6:]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["cache", "index", "photos"]
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1
    Path(files[0]).write_text("no image")
    with refused("1 of 12 files"):
        write(data, out)
    data.index, data.check_files = str(out), False
    assert sum(map(len, build_index(data))) == COUNT  # the one from before


def test_an_index_of_other_settings_or_of_no_files_is_refused(photos: Path, out: Path) -> None:
    with refused("data.val_count=4 (there: 3)"):
        build_index(config_of(photos, "data.val_count=4", f"data.index={out}").data)
    with refused("data=mnist_mini"):
        write(make_config().data, out.with_name("new"))
    assert not out.with_name("new").exists()
