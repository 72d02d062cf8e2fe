"""Data sets of torchvision, read from files that lie where it puts them, and of Hugging Face."""

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.index import Index
from tests.helpers import refused
from tests.images import index_of, loaders_of, save, smooth

LABELS = [3, 7]
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
GREY = IMAGES[:, :28, :28, :1]


def assert_has(index: Index, images: np.ndarray) -> None:
    """It has these images and their labels, of ten classes."""
    found = [index.read(number) for number in range(len(index))]
    assert np.array_equal(found, images)
    target: Any = index.target
    assert target.values.tolist() == LABELS
    assert len(target.classes) == 10


@pytest.mark.usefixtures("no_downloads")
def test_mnist_without_a_download_says_where_to_put_the_files(tmp_path) -> None:
    options, raw = ["data=mnist", f"data.root={tmp_path}"], tmp_path / "MNIST/raw"
    with refused(f"{tmp_path}", "MNIST/raw", "train-images-idx3-ubyte", "unpacked"):
        index_of(*options)
    raw.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images", GREY[..., 0]), ("labels", np.array(LABELS, np.uint8))):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        for split in ("train", "t10k"):
            path = raw / f"{split}-{kind}-idx{array.ndim}-ubyte"
            path.write_bytes(header + array.tobytes())
    with refused("data.val_count=1"):
        index_of(*options, "data.val_count=1")
    for index in index_of(*options):
        assert_has(index, GREY)
        assert index.target.classes == tuple("0123456789")


def test_cifar10_is_read_in_colours(tmp_path: Path) -> None:
    def cifar10(root: str, train: bool) -> SimpleNamespace:
        images = IMAGES if train else 255 - IMAGES
        return SimpleNamespace(data=images, targets=LABELS, classes=[*"abcdefghij"])

    with mock.patch("torchvision.datasets.CIFAR10", cifar10):
        train, val = index_of("data=cifar10", f"data.root={tmp_path}")
    assert_has(train, IMAGES)
    assert_has(val, 255 - IMAGES)


def test_caltech256_is_unpacked_once(tmp_path) -> None:
    place, name = tmp_path / "root" / "caltech256", "256_ObjectCategories"
    for file in ("001.a/1", "001.a/2", "002.b/1", "002.b/2"):
        save(tmp_path / "files" / name / f"{file}.jpg", smooth(0, 20, 30))
    packed = Path(shutil.make_archive(str(place / name), "tar", tmp_path / "files"))
    options = ["data=caltech256", f"data.root={tmp_path / 'root'}", f"data.cache_dir={tmp_path}"]
    md5 = hashlib.md5(packed.read_bytes()).hexdigest()
    with mock.patch("loaders.layouts.caltech256.MD5", md5):
        assert sum(map(len, index_of(*options, "data.val_count=1"))) == 4
    packed.unlink()
    assert sum(map(len, index_of(*options, "data.val_count=1"))) == 4
    assert [path.name for path in place.iterdir() if path.is_dir()] == [name]


def test_a_data_set_of_hugging_face_is_read_and_mistakes_are_refused(tmp_path: Path) -> None:
    """12 images, each of one value, cats and dogs in turn."""
    datasets = pytest.importorskip("datasets")
    kinds = {"photo": datasets.Image(), "label": datasets.ClassLabel(2, ["cat", "dog"])}
    photos = [Image.new("RGB", (36 + 9 * n, 40), (20 * n,) * 3) for n in range(12)]
    columns = {"photo": photos, "label": [n % 2 for n in range(12)]}
    rows = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    numbers = rows.cast_column("label", datasets.Value("int64"))
    for name, splits in {
        "all": {"train": rows},
        "split": {"train": rows, "validation": rows},
        "no classes": {"train": numbers, "test": numbers},
        "no train": {"test": rows},
    }.items():
        datasets.DatasetDict(splits).save_to_disk(tmp_path / name)
    options = ["data=huggingface", "data.resize=32", "data.crop=28", "global_batch_size=1"]
    options += ["data.mean=[0,0,0]", "data.std=[1,1,1]"]
    train, val = loaders_of(*options, f"data.root={tmp_path / 'all'}", "data.val_count=3")
    assert (train.info.classes, len(train), len(val)) == (("cat", "dog"), 9, 3)
    for loader in (train, val):
        for inputs, labels in loader:
            number = round(255 * inputs.mean().item() / 20)
            assert labels.tolist() == [number % 2]
            assert torch.allclose(inputs, torch.full((1, 3, 28, 28), 20 * number / 255))
    for fold in range(3):
        folds = ["data.num_folds=3", f"data.fold={fold}", "data.split_seed=1"]
        parts: Any = loaders_of(*options, f"data.root={tmp_path / 'all'}", *folds)
        assert [part.info.class_counts().tolist() for part in parts] == [[4, 4], [2, 2]]
    for folder, option, words in (
        ("split", "data.val_count=3", "data.val_count=3"),
        ("no classes", "data.resize=32", "photo, label"),
        ("no train", "data.resize=32", "train"),
        ("no train/test", "data.resize=32", "data.root"),
        ("all", "data.mean=null", "data.mean"),
    ):
        with refused(words):
            loaders_of(*options, f"data.root='{tmp_path / folder}'", option)
