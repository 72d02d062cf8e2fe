"""Large JPEGs decoded at a fraction of their size give nearly the pixels of the whole ones."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from loaders.image_loaders import build_loaders
from loaders.images import factor_for
from loaders.index import BadFileError, build_index
from loaders.read import read_resized
from tests.helpers import make_config
from tests.images import reading, save, smooth

CPU = torch.device("cpu")
HEIGHT, WIDTH = 403, 613  # no multiples of 8


def ramp(height: int, width: int) -> np.ndarray:
    """(height, width): grey that grows by 0.2 with each row and by 0.15 with each column."""
    y, x = np.mgrid[:height, :width]
    return (30 + 0.2 * y + 0.15 * x).astype(np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reduced_rectangle_is_the_same_place(orientation: int, tmp_path: Path) -> None:
    """To a tenth of a reduced pixel, whichever way the image is turned."""
    exif = Image.Exif()
    exif[0x112] = orientation
    rising = ramp(HEIGHT, WIDTH)
    for name, pixels in (("a", rising), ("b", 255 - rising)):
        save(tmp_path / "photos" / name / "0.jpg", pixels, exif=exif, quality=98)
    options = ["data=imagefolder", *reading(tmp_path / "photos"), "data.val_count=1"]
    both = build_index(make_config(*options).data)
    height, width = both[0].sizes[0].tolist()
    assert (height, width) == ((WIDTH, HEIGHT) if orientation >= 5 else (HEIGHT, WIDTH))
    places = [(0, 0), (33, 21), (height - 359, width - 361), (height - 360, width - 364)]
    sizes = {8: (33, 36), 4: (70, 72), 2: (130, 143)}
    for (y, x), (factor, size) in itertools.product(places, sizes.items()):
        assert factor_for((359, 361), size) == factor
        mean = []
        for index in both:
            rectangle = (y, x, 359, 361)
            reduced, whole = (read_resized(index, 0, 0, rectangle, size, r) for r in (True, False))
            assert reduced.shape == (*size, 3)
            difference = reduced.astype(float) - whole
            assert np.abs(difference).max() <= 3
            mean.append(difference.mean())
        # Another place changes the two by as much in opposite directions; rounding does not.
        one_pixel = 2 * 0.15 * factor
        assert abs(mean[0] - mean[1]) < 0.1 * one_pixel


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """16 large JPEGs, every other one progressive, and as many turned ones."""
    turned, root = Image.Exif(), tmp_path_factory.mktemp("reduced") / "photos"
    turned[0x112] = 6
    for number in range(16):
        exif = turned if number % 4 > 1 else Image.Exif()
        options = {"quality": 90, "progressive": number % 2 > 0, "exif": exif}
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


@pytest.mark.parametrize("crop", ["random_crop=true", "random_resized_crop=[0.3,1]"])
def test_reduced_decoding_changes_pixels_within_a_tolerance(crop: str, photos: Path) -> None:
    """Mean 0.6 and single pixels 6 of 255, against whole decoding and against DALI."""
    options = options_for(photos, f"data.{crop}")
    reduced = inputs_of(options)
    for other in ("data.reduced_decoding=false", "loader=dali"):
        difference = (reduced - inputs_of([*options, other])).abs()
        assert 0 < difference.mean() < 0.6, other
        assert difference.max() <= 6, other


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
