"""What the stand-in data sets promise: the published layout, learnable content, the same bytes."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from benchmarks import generate as gen
from benchmarks import photos

SMALL: dict[str, dict[str, Any]] = {
    "caltech256": {"size": 6, "num_classes": 3},
    "deblur": {"size": 6, "height": 64, "width": 96},
    "lowlight": {"size": 4, "height": 48, "width": 64},
    "cells": {"size": 14},
}


def files(root: Path) -> dict[str, bytes]:
    """Content of every file that is not hidden, by relative path."""
    paths = [p for p in sorted(root.rglob("*")) if p.is_file() and not p.name.startswith(".")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets in their small versions, each in a folder of its name."""
    root = tmp_path_factory.mktemp("made")
    for name, arguments in SMALL.items():
        gen.generate(name, root / name, workers=1, **arguments)
    return root


@pytest.mark.parametrize("name", SMALL)
def test_content_depends_on_the_seed_and_not_on_workers_or_the_number_of_files(
    made: Path, tmp_path: Path, name: str
) -> None:
    size = SMALL[name]["size"]
    gen.generate(name, tmp_path / "more", workers=2, **SMALL[name] | {"size": size + 3})
    gen.generate(name, tmp_path / "other", workers=1, seed=1, **SMALL[name])
    one, more, other = files(made / name), files(tmp_path / "more"), files(tmp_path / "other")
    assert one.items() < more.items()
    assert len(set(one.values())) == len(one), "two files have the same content"
    assert one.keys() == other.keys()
    assert not set(one.values()) & set(other.values())


def test_caltech256_has_numbered_class_folders_of_photographs(made: Path) -> None:
    paths = [made / "caltech256" / name for name in files(made / "caltech256")]
    assert sorted(path.parent.name[:4] for path in paths) == sorted(2 * ["001.", "002.", "003."])
    for path in paths:
        assert re.fullmatch(rf"{path.parent.name[:3]}_000[12]\.jpg", path.name)
        with Image.open(path) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert 300 <= image.width <= 640
            kilobytes_at_500x375 = path.stat().st_size / 1e3 * 500 * 375 / np.prod(image.size)
        assert 20 < kilobytes_at_500x375 < 75


@pytest.mark.parametrize(
    ("folder", "bad", "good", "names", "shape"),
    [
        ("deblur/train", "blurry", "sharp", 4 * ["train_0000/*.png"], (64, 96, 3)),
        ("deblur/test", "blurry", "sharp", 2 * ["test_0000/*.png"], (64, 96, 3)),
        ("lowlight", "low", "high", [f"{n:06d}.jpg" for n in range(4)], (48, 64, 3)),
    ],
)
def test_of_a_pair_one_image_is_blurred_or_dark(
    folder: str, bad: str, good: str, names: list[str], shape: tuple[int, ...], made: Path
) -> None:
    found = [[*files(made / folder / side)] for side in (bad, good)]
    assert found[0] == found[1]
    assert all(fnmatch(*pair) for pair in zip(found[0], names, strict=True))
    for name in found[0]:
        pair = [np.asarray(Image.open(made / folder / side / name), float) for side in (bad, good)]
        assert [image.shape for image in pair] == [shape, shape]
        light = [((image / 255) ** 2.2).mean() for image in pair]
        if bad == "low":
            assert light[0] < 0.5 * light[1]
        else:
            detail = [np.diff(image, axis=1).std() for image in pair]
            assert detail[0] < detail[1]
            assert light[0] == pytest.approx(light[1], rel=0.1)  # which blur keeps


def test_cells_are_interleaved_uncompressed_tiff_files_whose_classes_differ(tmp_path: Path) -> None:
    gen.generate("cells", tmp_path, 210, workers=1)
    means: dict[str, list[np.ndarray]] = {}
    for name in files(tmp_path):
        with tifffile.TiffFile(tmp_path / name) as tiff:
            page = tiff.pages.first
            assert (page.planarconfig, page.compression, page.samplesperpixel) == (1, 1, 5)
            array = tiff.asarray()
        assert (array.shape, array.dtype) == ((50, 50, 5), np.uint8)
        means.setdefault(Path(name).parent.name, []).append(np.log(array.mean((0, 1))))
    features = np.array(list(means.values()))  # (classes, cells, channels)
    centroids = features[:, ::2].mean(axis=1)
    distance = np.linalg.norm(features[:, 1::2, None] - centroids, axis=-1)
    assert (distance.argmin(-1) == np.arange(7)[:, None]).mean() > 0.9


def test_power_spectrum_is_that_of_natural_images() -> None:
    height, width = 360, 640
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    edges = np.geomspace(0.01, 0.25, 13)
    window = np.hanning(height)[:, None] * np.hanning(width)
    greys = [photos.dead_leaves(photos.stream(0, n), height, width).mean(-1) for n in range(4)]
    spectra = [abs(np.fft.rfft2((grey - grey.mean()) * window)) ** 2 for grey in greys]
    power = np.sum(spectra, axis=0)
    ring = np.digitize(frequency, edges)
    radial = [power[ring == index].mean() for index in range(1, len(edges))]
    slope, _ = np.polyfit(np.log(np.sqrt(edges[1:] * edges[:-1])), np.log(radial), 1)
    assert -2.6 < slope < -1.6


def test_running_again_writes_only_missing_files_and_leaves_other_data_alone(tmp_path) -> None:
    gen.generate("cells", tmp_path, workers=1, **SMALL["cells"])
    first, *others = before = files(tmp_path)
    (tmp_path / first).unlink()
    for other in others:
        (tmp_path / other).write_bytes(b"left alone")
    gen.generate("cells", tmp_path, workers=1, **SMALL["cells"])
    assert files(tmp_path) == {first: before[first]} | dict.fromkeys(others, b"left alone")
    with pytest.raises(FileExistsError, match='"seed": 0.*"seed": 1'):
        gen.generate("cells", tmp_path, seed=1, workers=1, **SMALL["cells"])
    (tmp_path / gen.RECORD).unlink()
    with pytest.raises(FileExistsError, match="empty root"):
        gen.generate("cells", tmp_path, workers=1, **SMALL["cells"])
