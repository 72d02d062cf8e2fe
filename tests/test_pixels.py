"""Photos whose pixels are right in no backend are refused, and those that are decoded in part.

test_contract.py has all others.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.images import HEADER, decode_resized, read_header
from tests.formats import noise, write_refused
from tests.helpers import refused
from tests.images import (
    FOLDERS,
    PLAIN,
    index_of,
    loaders_of,
    make_photos,
    paths_in,
    photos_in,
    reading,
    save,
    smooth,
    turned,
)
from tests.kinds import OTHERS


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


def test_transparent_photos_are_counted_in_the_first_lines(root: Path) -> None:
    for mode in ("LA", "RGBA"):
        image = Image.fromarray(noise(1, 255, len(mode)).astype(np.uint8).squeeze(), mode)
        save(root / "a" / f"{mode}.png", image)
    notes = 0
    for index in index_of(*photos_in(root, "data.val_count=4", "data.background=[10,200,70]")):
        [note] = [line for line in index.notes if "[10, 200, 70]" in line] or ["0 images"]
        notes += int(note.split()[0])
    assert notes == 2


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


OPTIONS = [*FOLDERS, "data.val_fraction=0.25", "global_batch_size=4"]
OPTIONS += [*PLAIN, "data.resize=64", "data.hflip=0.5"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """16 large JPEGs, turned in all ways; every third one is progressive."""
    root = tmp_path_factory.mktemp("reduced") / "photos"
    for number in range(16):
        options = {"quality": 90, "progressive": number % 3 > 1, "exif": turned(1 + number % 8)}
        image = smooth(number, 301 + number, 420 - 3 * number)
        save(root / "ab"[number % 2] / f"{number:02d}.jpg", image, **options)
    return root


@pytest.mark.parametrize(
    ("crops", "mean", "most"),
    [
        (["data.random_crop=true", "data.crop=[48,48]"], 0.6, 6),
        (["data.random_resized_crop=[0.3,1]", "data.crop=[24,24]"], 0.9, 12),  # most at 1/8
    ],
)
def test_reduced_decoding_changes_pixels_a_little(crops, mean, most, photos: Path) -> None:
    """Differences from whole decoding and from other backends, on average and at most, of 255."""
    found = []
    reduced, whole_images = ["data.reduced_decoding=true"], ["data.reduced_decoding=false"]
    for other in (reduced, whole_images, *OTHERS.values()):
        splits = loaders_of(*OPTIONS, *reading(photos), *crops, *other)
        found.append(torch.cat([inputs.clone() for split in splits for inputs, _ in split]))
    for whole in found[1:]:
        difference = 255 * (found[0] - whole).abs()
        assert 0 < difference.mean() < mean
        assert difference.max() <= most


def test_lines_of_a_png_are_right_or_its_damage_is_seen(tmp_path: Path) -> None:
    """One byte is damaged, each in turn."""
    image = np.random.default_rng(0).integers(0, 4, (12, 10, 3), dtype=np.uint8)
    save(path := tmp_path / "a.png", image)
    header = np.array([tuple(read_header(str(path), "rgb"))], HEADER)[0]
    content, num_errors = path.read_bytes(), 0
    for at in range(len(content)):
        damaged = content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]
        try:
            found = decode_resized(damaged, header, "rgb", (0, 0, 5, 10), (5, 10), "linear", False)
        except (OSError, SyntaxError):
            num_errors += 1
        else:
            assert np.array_equal(found, image[:5]), at
    assert num_errors > 0.8 * len(content)
