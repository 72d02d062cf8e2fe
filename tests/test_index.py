"""Where the samples come from, and how they become files once."""

import gzip
import io
import os
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from loaders.images import HEADER, Header, decode, read_header
from loaders.index import BadHeadersError, build_index
from loaders.read import read_image
from loaders.targets import Labels
from tests.helpers import make_config


def test_embedded_digits_are_the_promised_subset() -> None:
    train, val = build_index(make_config().data)
    assert (len(train), len(val)) == (10_000, 2_000)
    assert isinstance(train.target, Labels)
    assert train.target.classes == tuple("0123456789")
    assert train.target.values[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(train.target.values).min() > 800
    assert read_image(train, 9_999).shape == (28, 28, 1)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


def test_mnist_without_a_download_says_where_to_put_the_files(tmp_path, monkeypatch) -> None:
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])
    data = make_config("data=mnist", f"data.root={tmp_path}").data
    raw = tmp_path / "MNIST" / "raw"
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte.gz.* into {raw}"):
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
    assert isinstance(val.target, Labels)
    assert np.array_equal([read_image(train, n)[..., 0] for n in range(2)], digits)
    assert val.target.values.tolist() == [3, 7]


def test_mnist_is_read_without_a_lock_and_damage_is_told(tmp_path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        write_idx(raw / f"{split}-images-idx3-ubyte", np.zeros((2, 28, 28), np.uint8))
        write_idx(raw / f"{split}-labels-idx1-ubyte", np.array([3, 7], np.uint8))
    for path in raw.iterdir():
        path.write_bytes(gzip.decompress(path.read_bytes()))
    data = make_config("data=mnist", f"data.root={tmp_path}").data
    (tmp_path / "download.lock").mkdir()  # it can no more be opened than in a read-only folder
    assert [len(index) for index in build_index(data)] == [2, 2]
    images = raw / "t10k-images-idx3-ubyte"
    for content in (images.read_bytes()[:-1], images.read_bytes()[:3], b"", bytes(100)):
        images.write_bytes(content)
        with pytest.raises(ValueError, match=f"MNIST in {raw} cannot be read .*; remove what is"):
            build_index(data)


def test_caltech256_is_used_once_it_is_unpacked_as_a_whole(tmp_path, monkeypatch) -> None:
    """From an archive that was put there by hand: it is unpacked once in vain and then once more, while a
    second process asks for it, too."""
    from torchvision.datasets import utils

    root, archive = tmp_path / "root", tmp_path / "root/caltech256/256_ObjectCategories.tar"
    archive.parent.mkdir(parents=True)
    names = [f"256_ObjectCategories/{name}/{n}.jpg" for name in ("001.a", "002.b") for n in (1, 2)]
    with tarfile.open(archive, "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(jpeg_of())
            tar.addfile(member, io.BytesIO(jpeg_of()))
    unpack, half, may_end = utils.download_and_extract_archive, [], threading.Event()

    def slowly(url: str, folder: Path, unpacked: Path, filename: str, md5: str) -> None:
        with tarfile.open(folder / filename) as tar:
            tar.extract(names[0], unpacked, filter="data")
        half.append(unpacked)
        if len(half) == 1:
            raise KeyboardInterrupt
        may_end.wait(60)
        unpack(url, folder, unpacked, filename)

    monkeypatch.setattr(utils, "download_and_extract_archive", slowly)
    options = ["data=caltech256", f"data.root={root}", f"data.cache_dir={tmp_path}"]
    data = make_config(*options, "data.val_count=1").data
    with pytest.raises(KeyboardInterrupt):
        build_index(data)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(build_index, data)
        while len(half) < 2 and not first.done():
            time.sleep(0.01)
        second = pool.submit(build_index, data)
        time.sleep(0.2)
        assert not second.done()
        may_end.set()
        for future in (first, second):
            assert sum(map(len, future.result())) == len(names)
    assert len(half) == 2
    assert sorted(path.name for path in archive.parent.iterdir()) == [archive.stem, archive.name]


def jpeg_of(mode: str = "RGB", **options: object) -> bytes:
    """A JPEG of 20x30 pixels (height x width)."""
    content = io.BytesIO()
    Image.new(mode, (30, 20)).save(content, "JPEG", **options)
    return content.getvalue()


def test_jpeg_headers_are_read_as_by_pillow(tmp_path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    xmp = b'<x xmlns:tiff="t" tiff:Orientation="8"/>'
    plain = jpeg_of()
    upright = Header(20, 30, 3, 8, 1, dali_reads=True)
    on_its_side = Header(30, 20, 3, 8, 6, dali_reads=True)
    cases = [
        (plain, upright),
        (jpeg_of("L"), upright),
        (jpeg_of("CMYK"), upright._replace(dali_reads=False)),
        (jpeg_of(progressive=True), upright),
        (jpeg_of(comment=b"\xff\xd8\xff\xc0"), upright),
        (jpeg_of(icc_profile=profile), upright),
        (jpeg_of(icc_profile=bytes(40_000)), upright),
        (plain[:2] + b"\xff" + plain[2:], upright),  # a byte that fills
        (jpeg_of(exif=turned), on_its_side),
        (jpeg_of(exif=turned, icc_profile=profile), on_its_side),
        (jpeg_of(xmp=xmp), on_its_side._replace(orientation=8)),
        (plain[:-2], upright._replace(dali_reads=False)),
        (plain + b"\0", upright._replace(dali_reads=False)),
    ]
    path = tmp_path / "photo.jpg"
    for content, expected in cases:
        path.write_bytes(content)
        assert read_header(str(path), "rgb") == expected
    frame = plain.index(b"\xff\xc0")
    for damaged in (plain[: frame + 4], plain[:10]):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match="cannot identify|Truncated"):
            read_header(str(path), "rgb")


@pytest.fixture
def photos(tmp_path) -> Path:
    """Six JPEGs in two classes."""
    for number in range(6):
        path = tmp_path / "photos" / "ab"[number % 2] / f"ünï cöde {number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_of())
    return tmp_path / "photos"


LISTENERS: list[Callable[[str], None]] = []


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    for listen in LISTENERS if event == "open" else ():
        listen(str(arguments[0]))


sys.addaudithook(audit)


@contextmanager
def opening(listen: Callable[[str], None]) -> Iterator[None]:
    """Call `listen` with the path of each file that this process opens."""
    LISTENERS.append(listen)
    try:
        yield
    finally:
        LISTENERS.remove(listen)


def test_only_files_that_are_new_or_changed_are_read_again(photos, tmp_path) -> None:
    read: set[str] = set()

    def listen(path: str) -> None:
        if path.startswith(str(photos)):
            read.add(Path(path).name)

    def scan() -> dict[str, tuple[int, int]]:
        """Height and width by file, once it is clear which files were read."""
        read.clear()
        data = make_config(
            "data=imagefolder", f"data.root={photos}", f"data.cache_dir={cache}"
        ).data
        sizes: dict[str, tuple[int, int]] = {}
        with opening(listen):
            indexes = build_index(data)
        for index in indexes:
            names = [Path(name).name for name in index.files[0]]
            sizes |= zip(names, map(tuple, index.sizes.tolist()), strict=True)
        return sizes

    cache = tmp_path / "cache"
    before = scan()
    assert sorted(read) == sorted(before)
    assert set(before.values()) == {(20, 30)}
    assert scan() == before
    assert not read

    Image.new("RGB", (8, 9)).save(photos / "a" / "new.jpg")
    Image.new("RGB", (10, 11)).save(photos / "b" / "ünï cöde 1.jpg")
    (photos / "a" / "ünï cöde 0.jpg").unlink()
    after = before | {"new.jpg": (9, 8), "ünï cöde 1.jpg": (11, 10)}
    del after["ünï cöde 0.jpg"]
    assert scan() == after
    assert sorted(read) == ["new.jpg", "ünï cöde 1.jpg"]

    (photos / "a" / "page.jpg").write_text("<html>")
    shutil.copy(photos / "a" / "new.jpg", photos / "a" / "newer.jpg")
    with pytest.raises(BadHeadersError, match="1 of 8 files"):
        scan()
    (photos / "a" / "page.jpg").unlink()
    assert scan() == after | {"newer.jpg": (9, 8)}
    assert not read  # though the scan before ended with an error

    for kept in cache.glob("headers-*/headers.npy"):
        kept.write_bytes(kept.read_bytes()[:-100])
    assert scan() == after | {"newer.jpg": (9, 8)}
    assert len(read) == 7


@pytest.mark.parametrize("ending", ["tif", "jpg", "png"])
@pytest.mark.parametrize("orientation", [0, 1, 3, 5, 6, 7, 8, 9, 99])
def test_images_are_upright_and_an_invalid_orientation_is_ignored(
    orientation: int, ending: str, tmp_path
) -> None:
    pixels, path = np.zeros((20, 30, 3), np.uint8), str(tmp_path / f"image.{ending}")
    exif = Image.Exif()
    exif[0x112] = orientation
    more = {"tiffinfo": {274: orientation}} if ending == "tif" else {"exif": exif}
    Image.fromarray(pixels).save(path, **more)
    header = read_header(path, "rgb")
    shape = (30, 20) if orientation in (5, 6, 7, 8) else (20, 30)
    assert (header.height, header.width) == shape
    row = np.array([header], HEADER)[0]
    assert decode(Path(path).read_bytes(), row, "rgb").shape[:2] == shape


def test_a_pipe_with_the_name_of_an_image_is_named_and_not_waited_for(photos, tmp_path) -> None:
    options = ["data=imagefolder", f"data.root={photos}", f"data.cache_dir={tmp_path}"]
    options += ["data.val_count=3"]
    before = build_index(make_config(*options).data)
    pipe = photos / "a" / "pipe.jpg"
    os.mkfifo(pipe)
    with pytest.raises(BadHeadersError, match=str(pipe)):
        build_index(make_config(*options).data)
    after = build_index(make_config(*options, "data.on_error=skip").data)
    assert sum(map(len, after)) == sum(map(len, before))


def test_names_that_are_no_utf8_work(photos, tmp_path) -> None:
    image = next(path for path in photos.rglob("*") if path.is_file())
    name = os.fsencode(image.parent) + b"/caf\xe9.jpg"
    shutil.copy(image, name)
    options = ["data=imagefolder", f"data.root={photos}", f"data.cache_dir={tmp_path / 'c'}"]
    for _ in range(2):  # the second time from the cache
        train, val = build_index(make_config(*options).data)
        assert os.fsdecode(name) in [*train.files[0], *val.files[0]]
        assert train.fingerprint


def test_a_cache_folder_that_cannot_be_written_to_is_done_without(photos, tmp_path, caplog) -> None:
    (tmp_path / "file").touch()
    options = [
        "data=imagefolder",
        f"data.root={photos}",
        f"data.cache_dir={tmp_path / 'file' / 'c'}",
    ]
    assert len(build_index(make_config(*options).data)[0])
    assert "cannot be written to" in caplog.text


def test_a_cache_file_with_missing_parts_is_made_anew(photos, tmp_path) -> None:
    cfg = make_config("data=imagefolder", f"data.root={photos}", f"data.cache_dir={tmp_path / 'c'}")
    expected = build_index(cfg.data)[0].sizes
    [kept] = (tmp_path / "c").glob("headers-*/headers.npy")
    kept.unlink()
    assert (build_index(cfg.data)[0].sizes == expected).all()
    assert kept.exists()
