"""Photos whose pixels are right in no backend are refused; test_contract.py has all others."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.formats import HEIGHT, WIDTH, noise, write_refused
from tests.helpers import refused
from tests.images import (
    index_in,
    index_of,
    loaders_of,
    make_photos,
    paths_in,
    photos_in,
    save,
    smooth,
    turned,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 8)


def test_files_whose_pixels_would_change_are_named_at_the_start(root: Path) -> None:
    """With their types; TIFFs, with what reads them."""
    wrong = write_refused(root / "a")
    options = photos_in(root, "data.val_fraction=0.5", "data.on_error=skip")
    train, val = index_of(*options)
    reasons = {Path(path).name: why for path, why in (train.left_out | val.left_out).items()}
    assert reasons.keys() == wrong.keys()
    for name, text in wrong.items():
        assert text in reasons[name], name
        assert ("data=cells" in reasons[name]) == (name.endswith("tif") and name != "pages.tif")
    with refused(f"{len(wrong)} of {8 + len(wrong)}"):
        index_of(*options, "data.on_error=raise")


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_transparent_photos_are_those_that_pillow_pastes(mode: str, root: Path) -> None:
    """Their number is in the first lines."""
    colour = (10, 200, 70)
    image = Image.fromarray(noise(1, 255, len(mode)).astype(np.uint8).squeeze(), mode)
    save(path := root / "a" / "clear.png", image)
    save(root / "b" / "clear.webp", image.convert("RGBA"), lossless=True)
    expected = Image.new("RGB", (WIDTH, HEIGHT), colour)
    expected.paste(image.convert("RGBA"), mask=image.convert("RGBA"))
    options = photos_in(root, "data.val_count=4", f"data.background={[*colour]}")
    splits = loaders_of(*options, "data.crop=[30,30]")
    [index] = [index_in(split) for split in splits if str(path) in paths_in(index_in(split))]
    shown = index.read(paths_in(index).index(str(path)))
    assert np.array_equal(shown, np.asarray(expected))
    count = sum((index_in(split).source.headers[0]["background"] >= 0).sum() for split in splits)
    assert count == 2
    notes = [
        line for split in splits for line in index_in(split).notes if "data.background" in line
    ]
    assert sum(int(line.split()[0]) for line in notes) == 2
    assert all(str([*colour]) in line for line in notes)


def test_photos_are_turned_or_not(root: Path) -> None:
    """Also PNGs whose tags are behind their pixels."""
    stored = smooth(0, 50, 60)
    for name, form in (("one.png", "PNG"), ("two.png", "WEBP"), ("behind.png", "PNG")):
        save(root / "a" / name, Image.fromarray(stored), format=form, exif=turned(6), lossless=True)
    content = (behind := root / "a" / "behind.png").read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4])
    behind.write_bytes(content[:start] + content[end:-12] + content[start:end] + content[-12:])
    options = photos_in(root, "data.val_count=1")
    for more, expected in (("true", np.rot90(stored, -1)), ("false", stored), ("null", None)):
        expected = np.rot90(stored, -1) if expected is None else expected
        for index in index_of(*options, f"data.exif={more}"):
            for sample, name in enumerate(paths_in(index)):
                if name.endswith(".png"):
                    assert np.array_equal(index.read(sample), expected)
    Image.fromarray(stored).save(root / "a" / "three.tif", tiffinfo={0x112: 6})
    index_of(*options)
    with refused("three.tif"):  # which Pillow turns
        index_of(*options, "data.exif=false")
