"""Where the samples come from, and how they become files once."""

import gzip
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loaders.index import Index, as_image_tree, build_index
from tests.helpers import make_config


def test_embedded_digits_are_the_promised_subset() -> None:
    train, val = build_index(make_config().data)
    assert (len(train), len(val)) == (10_000, 2_000)
    assert train.labels is not None
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(train.labels).min() > 800
    assert train.images is not None
    assert train.images.shape == (10_000, 28, 28, 1)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


def test_mnist_without_a_download_says_where_to_put_the_files(tmp_path, monkeypatch) -> None:
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])
    data = make_config("data=mnist", f"data.root={tmp_path}").data
    raw = tmp_path / "MNIST" / "raw"
    with pytest.raises(FileNotFoundError, match=f"train-images-idx3-ubyte.gz.* into {raw}"):
        build_index(data)

    # The files put there by hand, here with other content and so with other checksums.
    digits = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
    for split in ("train", "t10k"):
        write_idx(raw / f"{split}-images-idx3-ubyte.gz", digits)
        write_idx(raw / f"{split}-labels-idx1-ubyte.gz", np.array([3, 7], np.uint8))
    monkeypatch.setattr(
        MNIST, "resources", [(f"{path.name}", None) for path in sorted(raw.glob("*.gz"))]
    )
    train, val = build_index(data)
    assert train.images is not None
    assert val.labels is not None
    assert np.array_equal(train.images[..., 0], digits)
    assert val.labels.tolist() == [3, 7]


def make_digits(count: int = 40) -> Index:
    images = np.random.default_rng(0).integers(0, 255, (count, 8, 6, 1), dtype=np.uint8)
    return Index("made/train", np.full((count, 2), (8, 6)), 1, np.arange(count) % 3, 3, images)


def test_an_image_tree_holds_the_same_pixels_and_is_written_once(tmp_path) -> None:
    index = make_digits()
    tree = as_image_tree(index, str(tmp_path))
    assert tree.files
    assert index.images is not None
    for sample in (0, 7, 39):
        assert np.array_equal(
            np.asarray(Image.open(tree.files[0][sample])), index.images[sample, ..., 0]
        )
        assert Path(tree.files[0][sample]).parent.name == str(sample % 3)
    before = Path(tree.files[0][0]).stat().st_mtime_ns
    assert as_image_tree(index, str(tmp_path)).files == tree.files
    assert Path(tree.files[0][0]).stat().st_mtime_ns == before


def _write(folder: str) -> list[str]:
    return as_image_tree(make_digits(), folder).files[0]


def test_ranks_that_start_together_write_one_tree(tmp_path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        files = pool.map(_write, [str(tmp_path)] * 3, chunksize=1)
    assert files[0] == files[1] == files[2]
    assert all(Path(name).exists() for name in files[0])
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_a_tree_that_was_not_finished_is_never_used(tmp_path, monkeypatch) -> None:
    original = Image.Image.save
    monkeypatch.setattr(Image.Image, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        as_image_tree(make_digits(), str(tmp_path))
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    monkeypatch.setattr(Image.Image, "save", original)
    assert len(_write(str(tmp_path))) == 40
