"""Of a JPEG that was decoded as a whole before, only the lines that are needed are decoded again."""

from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from loaders import jpeg
from loaders.index import BadFileError, Index
from loaders.layouts import build_index
from tests.helpers import make_config
from tests.test_datasets import smooth

SHAPE = (203, 157)  # no multiples of 16


def noisy() -> np.ndarray:
    """(H, W, 3): with colours that differ from line to line, as decoders blend them."""
    noise = np.random.default_rng(0).normal(0, 20, (*SHAPE, 3))
    return (smooth(0, *SHAPE) + noise).clip(0, 255).astype(np.uint8)


def index_of(folder: Path, *contents: bytes) -> Index:
    """Of these files for training, and one more for validation."""
    for number, content in enumerate([*contents, contents[0]]):
        path = folder / "photos" / "a" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    options = [f"data.root={folder / 'photos'}", f"data.cache_dir={folder}", "data.val_count=1"]
    return build_index(make_config("data=imagefolder", *options, "data.split_seed=0").data)[0]


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
@pytest.mark.parametrize("sampling", ["444", "422", "420", "440", "411", "Gray"])
def test_upper_lines_are_those_of_the_whole_image(sampling: str, factor: int, tmp_path) -> None:
    pixels, colours = noisy(), "GRAY" if sampling == "Gray" else "RGB"
    pixels = np.ascontiguousarray(pixels[..., :1]) if sampling == "Gray" else pixels
    index = index_of(tmp_path, simplejpeg.encode_jpeg(pixels, 80, colours, sampling))
    whole = index.read(0, factor=factor)
    assert len(whole) == -(-SHAPE[0] // factor)
    for num_lines in (1, 7, 8, 64, 100, 101, 150, SHAPE[0] - 1, SHAPE[0], SHAPE[0] + 1):
        upper = index.read(0, 0, num_lines, factor)
        if num_lines <= 150:
            assert len(upper) == -(-num_lines // factor), "lower lines were decoded"
        assert len(upper) * factor >= min(num_lines, SHAPE[0])
        assert np.array_equal(upper, whole[: len(upper)]), num_lines


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"exif": 3}, {"exif": 6}], ids=["progressive", "3", "6"]
)
def test_images_whose_lines_are_not_stored_from_above_are_decoded_whole(
    options, tmp_path: Path
) -> None:
    if "exif" in options:
        exif = Image.Exif()
        exif[0x112] = options["exif"]
        options = {"exif": exif}
    Image.fromarray(noisy()).save(tmp_path / "a.jpg", **options)
    index = index_of(tmp_path, (tmp_path / "a.jpg").read_bytes())
    whole = index.read(0)
    assert np.array_equal(index.read(0, num_lines=50), whole)


def test_damage_is_noticed_each_time_wherever_it_is(tmp_path: Path) -> None:
    """Also in lines that no crop needs, and though another file before it in the same byte was sound."""
    content = simplejpeg.encode_jpeg(noisy(), 80)
    damaged = [content[: len(content) * part // 4] for part in (1, 2, 3)]
    index = index_of(tmp_path, content, *damaged, content)
    broken = {n for n in range(len(index)) if Path(index.files[0][n]).read_bytes() != content}
    assert len(broken) >= 2
    for _ in range(3):
        for sample in range(len(index)):
            if sample in broken:
                with pytest.raises(BadFileError, match="truncated"):
                    index.read(sample, num_lines=20)
            else:
                index.read(sample, num_lines=20)


def test_headers_of_all_kinds_are_read(tmp_path: Path) -> None:
    """Fill bytes before a marker, a comment that holds one, and any part of a header."""
    content = simplejpeg.encode_jpeg(noisy(), 80)
    filled = content[:2] + b"\xff" + content[2:]
    commented = content[:2] + b"\xff\xfe\0\x08\xff\xc0\0\x11\0\0" + content[2:]
    for variant in (filled, commented):
        index = index_of(tmp_path / str(len(variant)), variant)
        whole = index.read(0)
        assert np.array_equal(index.read(0, num_lines=50)[:50], whole[:50])
    assert jpeg.upper_lines(commented, 50, 1) is not None
    for end in range(3, 200):
        jpeg.upper_lines(content[:end], 50, 1)
