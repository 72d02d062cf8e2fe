"""Images decoded in part: JPEGs give nearly the pixels of the whole ones, PNGs the same."""

from pathlib import Path

import numpy as np
import pytest
import torch

from loaders.images import HEADER, decode_resized, read_header
from tests.images import FOLDERS, PLAIN, loaders_of, reading, save, smooth, turned
from tests.kinds import OTHERS

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
