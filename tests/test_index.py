"""Where the samples come from, and how they become files once."""

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from conf.errors import UserError
from loaders.images import Header, decode, read_header
from loaders.index import build_index
from loaders.read import read_image
from loaders.targets import Labels
from tests.helpers import make_config
from tests.images import header_of, make_photos, opening, reading, save, smooth


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
    with pytest.raises(
        UserError, match=rf"{raw} .*; .* train-images-idx3-ubyte, .* unpacked"
    ) as error:
        build_index(data)
    assert len(str(error.value).splitlines()) == 1  # of more, the last ones are not shown
    write_mnist(raw)
    train, val = build_index(data)
    assert isinstance(val.target, Labels)
    assert np.array_equal([read_image(train, n)[..., 0] for n in range(2)], DIGITS)
    assert val.target.values.tolist() == [3, 7]


def test_mnist_is_read_without_a_lock_and_damage_is_named(tmp_path) -> None:
    write_mnist(raw := tmp_path / "MNIST" / "raw")
    data = make_config("data=mnist", f"data.root={tmp_path}").data
    (tmp_path / "download.lock").mkdir()  # it can no more be opened than in a read-only folder
    assert [len(index) for index in build_index(data)] == [2, 2]
    images = raw / "t10k-images-idx3-ubyte"
    for content in (images.read_bytes()[:-1], images.read_bytes()[:3], b"", bytes(100)):
        images.write_bytes(content)
        with pytest.raises(UserError, match=f"MNIST in {raw} cannot be read"):
            build_index(data)


def test_caltech256_is_used_once_it_is_unpacked_as_a_whole(tmp_path, monkeypatch) -> None:
    """Its first unpacking is stopped."""
    from torchvision.datasets import utils

    attempts = []

    def unpack(url: str, folder: Path, unpacked: Path, filename: str, md5: str) -> None:
        attempts.append(unpacked)
        for number, name in enumerate(("001.a/1", "001.a/2", "002.b/1", "002.b/2")):
            path = unpacked / filename.removesuffix(".tar") / f"{len(attempts)}{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg_of())
            if number == 1 and len(attempts) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(utils, "download_and_extract_archive", unpack)
    options = ["data=caltech256", f"data.root={tmp_path / 'root'}", f"data.cache_dir={tmp_path}"]
    data = make_config(*options, "data.val_count=1").data
    with pytest.raises(KeyboardInterrupt):
        build_index(data)
    assert [sum(map(len, build_index(data))) for _ in range(2)] == [4, 4]
    assert len(attempts) == 2
    assert [path.name for path in (tmp_path / "root/caltech256").iterdir()] == [
        "256_ObjectCategories"
    ]


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
    upright, on_its_side = Header(20, 30, 3, 8, 1), Header(30, 20, 3, 8, 6)
    upright = upright._replace(dali_reads=True)  # part: dali
    on_its_side = on_its_side._replace(dali_reads=True)  # part: dali
    cases = [
        (plain, upright),
        (jpeg_of("L"), upright),
        (jpeg_of("CMYK"), upright._replace(dali_reads=False)),  # part: dali
        (jpeg_of(progressive=True), upright),
        (jpeg_of(comment=b"\xff\xd8\xff\xc0"), upright),
        (jpeg_of(icc_profile=profile), upright),
        (jpeg_of(icc_profile=bytes(40_000)), upright),
        (plain[:2] + b"\xff" + plain[2:], upright),  # a byte that fills
        (jpeg_of(exif=turned), on_its_side),
        (jpeg_of(exif=turned, icc_profile=profile), on_its_side),
        (jpeg_of(xmp=xmp), on_its_side._replace(orientation=8)),
        (plain[:-2], upright._replace(dali_reads=False)),  # part: dali
        (plain + b"\0", upright._replace(dali_reads=False)),  # part: dali
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


@pytest.mark.parametrize("ending", ["tif", "jpg", "png"])
@pytest.mark.parametrize("orientation", [0, 1, 3, 5, 6, 7, 8, 9])
def test_images_are_upright_and_an_invalid_orientation_is_ignored(
    orientation: int, ending: str, tmp_path
) -> None:
    path, exif = tmp_path / f"image.{ending}", Image.Exif()
    exif[0x112] = orientation
    more = {"tiffinfo": {274: orientation}} if ending == "tif" else {"exif": exif}
    Image.new("RGB", (30, 20)).save(path, **more)
    header = header_of(path, "rgb")
    shape = (30, 20) if orientation in (5, 6, 7, 8) else (20, 30)
    assert (header["height"], header["width"]) == shape
    assert decode(path.read_bytes(), header, "rgb").shape[:2] == shape


def scan(root: Path, *more: str) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Height and width by file; and the files whose headers were read."""
    options = ["data=imagefolder", *reading(root, "data.val_count=3"), *more]
    read: set[str] = set()
    with opening(read.add):
        indexes = build_index(make_config(*options).data)
    sizes: dict[str, tuple[int, int]] = {}
    for index in indexes:
        names = [Path(name).name for name in index.files[0]]
        sizes |= zip(names, map(tuple, index.sizes.tolist()), strict=True)
    return sizes, {Path(path).name for path in read if path.startswith(str(root))}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 6)


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
    with pytest.raises(UserError, match="1 of 8 files"):
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


def test_a_pipe_with_the_name_of_an_image_is_named_and_not_waited_for(photos: Path) -> None:
    sizes, _ = scan(photos)
    os.mkfifo(pipe := photos / "a" / "pipe.jpg")
    with pytest.raises(UserError, match=str(pipe)):
        scan(photos)
    assert scan(photos, "data.on_error=skip")[0] == sizes


def test_names_that_are_no_utf8_work(photos: Path) -> None:  # part: header_cache
    name = os.fsdecode(os.fsencode(photos / "a") + b"/caf\xe9.jpg")
    Path(name).write_bytes(jpeg_of())
    for num_read in (7, 0):  # the second time from the cache
        sizes, read = scan(photos)
        assert Path(name).name in sizes
        assert len(read) == num_read


def test_a_cache_folder_that_cannot_be_written_to_is_done_without(photos: Path, caplog) -> None:
    photos.with_name("cache").touch()
    assert len(scan(photos)[0]) == 6
    assert "data.cache_dir" in caplog.text
