"""Photos whose pixels are right in no backend are refused; test_contract.py has all others."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.formats import HEIGHT, WIDTH, noise, write_refused
from tests.helpers import refused
from tests.images import (
    index_of,
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
    """TIFFs, with what reads them."""
    good = {path.name for path in (root / "a").iterdir()}
    wrong = write_refused(root / "a") - good
    options = photos_in(root, "data.val_fraction=0.5", "data.on_error=skip")
    train, val = index_of(*options)
    reasons = {Path(path).name: why for path, why in (train.left_out | val.left_out).items()}
    assert reasons.keys() == wrong
    for name, reason in reasons.items():
        assert ("data=cells" in reason) == (name.endswith("tif") and name != "pages.tif")
    with refused(f"{len(wrong)} of {8 + len(wrong)}"):
        index_of(*options, "data.on_error=raise")


def test_transparent_photos_are_those_that_pillow_pastes(root: Path) -> None:
    """Their number is in the first lines."""
    background = (10, 200, 70)
    expected = {}
    for mode in ("LA", "RGBA"):
        image = Image.fromarray(noise(1, 255, len(mode)).astype(np.uint8).squeeze(), mode)
        save(path := root / "a" / f"{mode}.png", image)
        expected[str(path)] = Image.new("RGB", (WIDTH, HEIGHT), background)
        expected[str(path)].paste(image.convert("RGBA"), mask=image.convert("RGBA"))
    notes = 0
    for index in index_of(*photos_in(root, "data.val_count=4", f"data.background={[*background]}")):
        for sample, file in enumerate(paths_in(index)):
            if file in expected:
                assert np.array_equal(index.read(sample), np.asarray(expected[file]))
        [note] = [line for line in index.notes if str([*background]) in line] or ["0 images"]
        notes += int(note.split()[0])
    assert notes == len(expected)


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
    for given, expected in (("null", np.rot90(stored, -1)), ("false", stored)):
        for index in index_of(*options, f"data.exif={given}"):
            for sample, name in enumerate(paths_in(index)):
                if name.endswith(".png"):
                    assert np.array_equal(index.read(sample), expected)
    Image.fromarray(stored).save(root / "a" / "three.tif", tiffinfo={0x112: 6})
    index_of(*options)
    with refused("three.tif"):  # which Pillow turns
        index_of(*options, "data.exif=false")
