"""Images decoded in part: JPEGs give nearly the pixels of the whole ones, PNGs the same."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.image_loaders import build_loaders
from loaders.images import decode, decode_partly
from loaders.index import BadFileError, build_index
from loaders.read import read_resized
from tests.helpers import make_config
from tests.images import header_of, reading, save, smooth

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """16 large JPEGs, turned in all ways; every third one is progressive."""
    exif, root = Image.Exif(), tmp_path_factory.mktemp("reduced") / "photos"
    for number in range(16):
        exif[0x112] = 1 + number % 8
        options = {"quality": 90, "progressive": number % 3 > 1, "exif": exif}
        image = smooth(number, 301 + number, 420 - 3 * number)
        save(root / "ab"[number % 2] / f"{number:02d}.jpg", image, **options)
    return root


def options_for(photos: Path, *overrides: str) -> list[str]:
    return [
        *("data=imagefolder", *reading(photos), "data.val_fraction=0.25", "global_batch_size=4"),
        *("data.mean=null", "data.std=null"),
        *("data.crop=[48,48]", "data.resize=64", "data.random_crop=true", "data.hflip=0.5"),
        *overrides,
    ]


def inputs_of(options: list[str]) -> torch.Tensor:
    """Those of an epoch and of the validation, in units of 1/255."""
    loaders = build_loaders(make_config(*options), CPU)
    return 255 * torch.cat([inputs.clone() for loader in loaders for inputs, _ in loader])


@pytest.mark.parametrize(
    ("crop", "size", "mean", "most"),
    [
        ("random_crop=true", 48, 0.6, 6),
        ("random_resized_crop=[0.3,1]", 48, 0.6, 6),
        ("random_resized_crop=[0.3,1]", 24, 0.9, 12),  # most of them at 1/8
    ],
)
def test_reduced_decoding_changes_pixels_within_a_tolerance(
    crop: str, size: int, mean: float, most: float, photos: Path
) -> None:
    """Differences from whole decoding and from DALI, on average and at most, of 255."""
    options = options_for(photos, f"data.{crop}", f"data.crop=[{size},{size}]")
    reduced = inputs_of(options)
    for other in ("data.reduced_decoding=false", "loader=dali"):
        difference = (reduced - inputs_of([*options, other])).abs()
        assert 0 < difference.mean() < mean, other
        assert difference.max() <= most, other


@pytest.mark.parametrize("place", [0.4, 0.97])
def test_damage_is_noticed_in_reduced_images_too(place: float, photos: Path, tmp_path) -> None:
    root = shutil.copytree(photos, tmp_path / "photos")
    data = make_config(*options_for(root)).data
    for name in build_index(data)[0].files[0][:4]:  # both kinds of JPEG, upright and turned
        content = Path(name).read_bytes()
        Path(name).write_bytes(content[: int(place * len(content))])
    index = build_index(data)[0]
    for sample in range(4):
        height, width = index.sizes[sample].tolist()
        with pytest.raises(BadFileError, match="truncated"):
            read_resized(index, sample, 0, (0, 0, height, width), (32, 32), True)


def test_lines_of_a_png_are_right_or_its_damage_is_seen(tmp_path: Path) -> None:
    """One byte is damaged, each in turn."""
    image = np.random.default_rng(0).integers(0, 4, (12, 10, 3), dtype=np.uint8)
    save(path := tmp_path / "a.png", image)
    content, header, num_errors = path.read_bytes(), header_of(path, "rgb"), 0
    for at in range(len(content)):
        damaged = content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]
        try:
            found = decode_partly(damaged, header, (0, 0, 5, 10), (5, 10), False)
            found = decode(damaged, header, "rgb")[:5] if found is None else found
        except (OSError, SyntaxError):
            num_errors += 1
        else:
            assert np.array_equal(found, image[:5]), at
    assert num_errors > 0.8 * len(content)
