"""Data sets that torchvision downloads, from a server that has files of the same format."""

import gzip
import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, FashionMNIST

from conf.errors import UserError
from loaders.index import read_image
from loaders.targets import Labels
from tests.helpers import refused
from tests.images import index_of, save, smooth

LABELS = [3, 7]
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
GREY = IMAGES[:, :28, :28, 0]
SPLITS = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
NAMES = [f"class{number}" for number in range(10)]


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which its files are served."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def fashion_in(folder: Path, url: str) -> dict[str, Any]:
    """Write the files, and return what makes torchvision fetch them."""
    hashes = []
    for split in ("train", "t10k"):
        for kind, array in (("images-idx3", GREY), ("labels-idx1", np.array(LABELS, np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            content, name = gzip.compress(header + array.tobytes()), f"{split}-{kind}-ubyte.gz"
            (folder / name).write_bytes(content)
            hashes.append((name, md5(content)))
    return {"mirrors": [url], "resources": hashes}


def cifar10_in(folder: Path, url: str) -> dict[str, Any]:
    planes = IMAGES.transpose(0, 3, 1, 2).reshape(2, -1)
    files = {name: pickle.dumps({"data": planes, "labels": LABELS}) for name in SPLITS}
    files["batches.meta"] = pickle.dumps({"label_names": NAMES})
    path = folder / CIFAR10.filename
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    hashes = [[name, md5(files[name])] for name in SPLITS]
    return {
        "url": url + path.name,
        "tgz_md5": md5(path.read_bytes()),
        "train_list": hashes[:5],
        "test_list": hashes[5:],
        "meta": CIFAR10.meta | {"md5": md5(files["batches.meta"])},
    }


@pytest.mark.parametrize(
    ("dataset", "serve", "images", "num_train"),
    [(FashionMNIST, fashion_in, GREY[..., None], 2), (CIFAR10, cifar10_in, IMAGES, 10)],
)
def test_what_is_downloaded_once_is_checked_and_read(
    dataset: Any, serve: Any, images: np.ndarray, num_train: int, mirror, tmp_path: Path
) -> None:
    name = {FashionMNIST: "fashion", CIFAR10: "cifar10"}[dataset]
    options = [f"data={name}", f"data.root={tmp_path}", "data.crop=null"]
    with mock.patch.multiple(dataset, **serve(*mirror)):
        whole = {path: path.read_bytes() for path in mirror[0].iterdir()}
        *_, last = sorted(whole)
        last.write_bytes(b"damaged")
        with pytest.raises(UserError, match=name):
            index_of(*options)
        last.write_bytes(whole[last])
        train, val = index_of(*options)
        for path in whole:
            path.unlink()
        assert [len(index) for index in index_of(*options)] == [num_train, 2]
    assert np.array_equal([read_image(val, n) for n in range(2)], images)
    target: Any = train.target
    assert target.values.tolist() == LABELS * (num_train // 2)
    assert len(target.classes) == 10


@pytest.mark.usefixtures("no_downloads")
def test_mnist_without_a_download_says_where_to_put_the_files(tmp_path) -> None:
    options, raw = ["data=mnist", f"data.root={tmp_path}"], tmp_path / "MNIST/raw"
    # In one line: of more, the last ones are not shown.
    with pytest.raises(UserError, match=rf"^.*{raw} .*train-images-idx3-ubyte.*unpacked.*$"):
        index_of(*options)
    raw.mkdir(parents=True, exist_ok=True)
    digits, labels = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28), [3, 7]
    for split in ("train", "t10k"):
        for kind, array in (("images-idx3", digits), ("labels-idx1", np.array(labels, np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (raw / f"{split}-{kind}-ubyte").write_bytes(header + array.tobytes())
    with refused("data.val_count=1"):
        index_of(*options, "data.val_count=1")
    train, val = index_of(*options)
    assert isinstance(val.target, Labels)
    assert np.array_equal([read_image(train, n)[..., 0] for n in range(2)], digits)
    assert val.target.values.tolist() == labels


def test_caltech256_is_unpacked_once(tmp_path, monkeypatch) -> None:
    from torchvision.datasets import utils

    def unpack(url: str, folder: Path, unpacked: Path, filename: str, md5: str) -> None:
        for name in ("001.a/1", "001.a/2", "002.b/1", "002.b/2"):
            save(unpacked / filename.removesuffix(".tar") / f"{name}.jpg", smooth(0, 20, 30))

    monkeypatch.setattr(utils, "download_and_extract_archive", unpack)
    options = ["data=caltech256", f"data.root={tmp_path / 'root'}", f"data.cache_dir={tmp_path}"]
    assert [sum(map(len, index_of(*options, "data.val_count=1"))) for _ in "ab"] == [4, 4]
    assert [p.name for p in (tmp_path / "root/caltech256").iterdir()] == ["256_ObjectCategories"]
