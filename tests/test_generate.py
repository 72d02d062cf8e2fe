"""What the stand-in data sets promise: the published layout, learnable content, the same bytes."""

import hashlib
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from loaders import generate as gen

SMALL: dict[str, dict[str, Any]] = {
    "caltech256": {"size": 6, "num_classes": 3},
    "photographs": {"size": 4, "height": 48, "width": 64},
    "deblur": {"size": 6, "height": 64, "width": 96},
    "lowlight": {"size": 4, "height": 48, "width": 64},
    "cells": {"size": 14},
}


def files(root: Path) -> dict[str, str]:
    """Relative path to content hash of every file that is not hidden."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets in their small versions, each in a folder of its name."""
    root = tmp_path_factory.mktemp("made")
    for name, arguments in SMALL.items():
        gen.generate(name, root / name, workers=1, **arguments)
    return root


@pytest.mark.parametrize("name", SMALL)
def test_content_depends_on_the_seed_and_not_on_the_number_of_workers(
    made: Path, tmp_path: Path, name: str
) -> None:
    gen.generate(name, tmp_path / "two", workers=2, **SMALL[name])
    gen.generate(name, tmp_path / "other", workers=1, seed=1, **SMALL[name])
    one, two, other = files(made / name), files(tmp_path / "two"), files(tmp_path / "other")
    assert one == two
    assert len(set(one.values())) == len(one), "two files have the same content"
    assert one.keys() == other.keys()
    assert not set(one.values()) & set(other.values())


@pytest.mark.parametrize("name", SMALL)
def test_a_larger_set_begins_with_the_files_of_a_smaller_one(
    made: Path, tmp_path: Path, name: str
) -> None:
    arguments = SMALL[name] | {"size": SMALL[name]["size"] + 3}
    gen.generate(name, tmp_path / name, workers=1, **arguments)
    assert files(made / name).items() < files(tmp_path / name).items()


@pytest.mark.parametrize("name", SMALL)
def test_work_can_be_sent_to_a_spawned_process(tmp_path: Path, name: str) -> None:
    options = gen._complete(name, 99, {})
    work = pickle.dumps(partial(gen.WRITERS[name], root=tmp_path, seed=0, **options))
    assert pickle.loads(work).func is gen.WRITERS[name]


def test_importing_the_module_alone_does_not_import_torch() -> None:
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='generate'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert gen.__file__ is not None
    subprocess.run([sys.executable, "-c", code, gen.__file__], check=True)


def test_caltech256_has_numbered_class_folders_of_jpeg_files(made: Path) -> None:
    paths = [Path(name) for name in files(made / "caltech256")]
    assert len(paths) == 6
    folders = {path.parent.name for path in paths}
    assert sorted(folder[:4] for folder in folders) == ["001.", "002.", "003."]
    for path in paths:
        assert re.fullmatch(rf"{path.parent.name[:3]}_000[12]\.jpg", path.name)


def test_caltech256_images_have_the_sizes_of_photographs(made: Path) -> None:
    sizes = set()
    for path in (made / "caltech256").rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert 300 <= image.width <= 640
            sizes.add(image.size)
            kilobytes_at_500x375 = path.stat().st_size / 1e3 * 500 * 375 / np.prod(image.size)
            assert 20 < kilobytes_at_500x375 < 75
    assert len(sizes) > 1


def test_caltech256_class_names_are_distinct_up_to_the_largest_number_of_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr(gen, "dead_leaves", lambda rng, height, width, *look: looks.append(look))
    monkeypatch.setattr(gen, "_save_photo", lambda path, image, quality: None)
    for number in range(275):
        gen._write_caltech256(number, tmp_path, 0, 275)
    assert len(set(looks)) == 275


def test_caltech256_takes_fewer_classes_where_the_size_allows_no_more() -> None:
    assert gen._complete("caltech256", 514, {})["num_classes"] == 257
    assert gen._complete("caltech256", 21, {})["num_classes"] == 10


def test_deblur_has_pairs_in_scenes_and_a_third_of_them_for_testing(made: Path) -> None:
    root = made / "deblur"
    for split, num_pairs in (("train", 4), ("test", 2)):
        blurry, sharp = files(root / split / "blurry"), files(root / split / "sharp")
        assert blurry.keys() == sharp.keys()
        assert len(sharp) == num_pairs
        assert {Path(name).parent.name for name in sharp} == {f"{split}_0000"}
        for name in sharp:
            for side in ("blurry", "sharp"):
                with Image.open(root / split / side / name) as image:
                    image.load()
                    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (96, 64))


def test_deblur_writes_jpeg_files_when_asked(tmp_path: Path) -> None:
    gen.generate("deblur", tmp_path / "d", 3, workers=1, height=32, width=32, format="jpg")
    names = files(tmp_path / "d")
    assert len(names) == 6
    for name in names:
        with Image.open(tmp_path / "d" / name) as image:
            assert image.format == "JPEG"


def test_lowlight_has_pairs_of_jpeg_files(made: Path) -> None:
    low, high = files(made / "lowlight/low"), files(made / "lowlight/high")
    assert list(low) == list(high) == [f"{number:06d}.jpg" for number in range(4)]
    for name in low:
        pair = []
        for side in ("low", "high"):
            with Image.open(made / "lowlight" / side / name) as image:
                assert (image.format, image.size) == ("JPEG", (64, 48))
                pair.append(np.asarray(image).mean())
        assert pair[0] < 0.7 * pair[1]


@pytest.mark.parametrize(("channels", "dtype"), [(5, "uint8"), (7, "uint16")])
def test_cells_are_interleaved_uncompressed_tiff_files(
    tmp_path: Path, channels: int, dtype: str
) -> None:
    gen.generate("cells", tmp_path / "c", 14, workers=1, channels=channels, dtype=dtype)
    names = [Path(name) for name in files(tmp_path / "c")]
    assert sorted({name.parent.name for name in names}) == sorted(gen.CELLS)
    assert len(names) == 14
    for name in names:
        with tifffile.TiffFile(tmp_path / "c" / name) as tiff:
            page = tiff.pages.first
            assert len(tiff.pages) == 1
            assert (page.planarconfig, page.compression, page.samplesperpixel) == (1, 1, channels)
            array = tiff.asarray()
        assert (array.shape, array.dtype) == ((50, 50, channels), np.dtype(dtype))
        assert array.std(axis=(0, 1)).min() > 0


def test_cell_classes_can_be_told_apart_by_their_channels() -> None:
    def means(first: int) -> np.ndarray:
        """Mean of each channel, (classes, 30 cells, channels)."""
        cells = [
            [gen.cell(gen.stream(first, 30 * c + i), c).mean((0, 1)) for i in range(30)]
            for c in range(len(gen.CELLS))
        ]
        return np.log(cells)

    centroids = means(first=0).mean(axis=1)
    distance = np.linalg.norm(means(first=1)[:, :, None] - centroids, axis=-1)
    correct = distance.argmin(-1) == np.arange(len(gen.CELLS))[:, None]
    assert correct.mean() > 0.9


def test_hue_of_a_class_prevails_in_its_images() -> None:
    for index, hue in enumerate((0.0, 1 / 3, 2 / 3)):
        image = gen.dead_leaves(gen.stream(0, index), 120, 160, hue, "square", 45.0)
        assert image.mean((0, 1)).argmax() == index


@pytest.mark.parametrize("shape", gen.SHAPES)
def test_leaves_of_every_shape_cover_the_image(shape: str) -> None:
    labels, centres = gen._leaf_map(gen.stream(0, 0), 100, 150, shape)
    assert labels.shape == (100, 150)
    assert (labels == centres.shape[1] - 1).mean() < 0.002
    image = gen.dead_leaves(gen.stream(0, 0), 100, 150, shape=shape)
    assert (image.shape, image.dtype) == ((100, 150, 3), np.uint8)
    assert (image.max(-1) == 0).mean() < 0.002


def test_power_spectrum_is_that_of_natural_images() -> None:
    height, width = 360, 640
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    edges = np.geomspace(0.01, 0.25, 13)
    ring = np.digitize(frequency, edges)
    window = np.hanning(height)[:, None] * np.hanning(width)
    power = np.zeros_like(frequency)
    for number in range(6):
        grey = gen.dead_leaves(gen.stream(0, number), height, width).mean(-1)
        power += abs(np.fft.rfft2((grey - grey.mean()) * window)) ** 2
    radial = [power[ring == index].mean() for index in range(1, len(edges))]
    centres = np.sqrt(edges[1:] * edges[:-1])
    slope, _ = np.polyfit(np.log(centres), np.log(radial), 1)
    assert -2.6 < slope < -1.6


@pytest.mark.parametrize("size", [3, 19, 37])
def test_shake_kernel_has_sum_one_and_its_mean_in_the_middle(size: int) -> None:
    kernels = [gen.shake_kernel(gen.stream(0, number), size) for number in range(20)]
    offset = np.arange(size) - size // 2
    for kernel in kernels:
        assert (kernel.shape, kernel.dtype) == ((size, size), np.float32)
        assert kernel.min() >= 0
        assert kernel.sum() == pytest.approx(1, abs=1e-5)
        assert (kernel.sum(0) @ offset, kernel.sum(1) @ offset) == pytest.approx((0, 0), abs=1e-3)
        assert kernel.max() < 0.9, "nothing moves"


def test_blur_keeps_the_light_and_removes_detail() -> None:
    sharp = gen.dead_leaves(gen.stream(0, 0), 128, 192)
    blurry = gen.blur(sharp, gen.shake_kernel(gen.stream(0, 1), 15))
    sharp = sharp[7:-7, 7:-7]
    assert blurry.shape == sharp.shape
    assert gen._to_linear(blurry).mean() == pytest.approx(gen._to_linear(sharp).mean(), rel=0.03)
    detail = [np.diff(image.astype(float), axis=1).std() for image in (blurry, sharp)]
    assert detail[0] < 0.75 * detail[1]


def test_blur_is_a_convolution_in_linear_light_aligned_with_the_cropped_image() -> None:
    sharp = gen.dead_leaves(gen.stream(0, 0), 40, 50)
    kernel = gen.shake_kernel(gen.stream(0, 1), 5)
    light = sum(
        kernel[2 + y, 2 + x] * (sharp[2 - y : 38 - y, 2 - x : 48 - x] / 255.0) ** 2.2
        for y in range(-2, 3)
        for x in range(-2, 3)
    )
    expected = np.rint(255 * light ** (1 / 2.2))
    assert np.abs(gen.blur(sharp, kernel) - expected).max() <= 1


def test_low_light_is_darker_and_noisier() -> None:
    grey = np.full((64, 64, 3), 128, np.uint8)
    for number in range(10):
        low = gen.low_light(gen.stream(0, number), grey)
        assert (low.shape, low.dtype) == (grey.shape, np.uint8)
        assert 20 < low.mean() < 70  # 1/20 to 1/5 of the light, gamma-coded
        assert low.std() > 1


@pytest.mark.parametrize("name", SMALL)
def test_running_again_keeps_whole_files_and_writes_only_missing_ones(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / name
    gen.generate(name, root, workers=1, **SMALL[name])
    before = files(root)
    first, *others = before
    (root / first).unlink()
    for other in others:
        (root / other).write_bytes(b"left alone")
    gen.generate(name, root, workers=1, **SMALL[name])
    assert files(root)[first] == before[first]
    # The partner of a missing file is written again along with it.
    num_new = 2 if name in ("deblur", "lowlight") else 1
    kept = [other for other in others if (root / other).read_bytes() == b"left alone"]
    assert len(kept) == len(before) - num_new
    assert not list(root.rglob("*.tmp"))


def test_a_root_with_other_data_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.jpg").write_bytes(b"")
    with pytest.raises(FileExistsError, match="use an empty root"):
        gen.generate("cells", tmp_path, 4, workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jpg"]

    gen.generate("cells", tmp_path / "set", 4, workers=1)
    with pytest.raises(FileExistsError, match=r'"seed": 0.*"seed": 1.*another root'):
        gen.generate("cells", tmp_path / "set", 4, seed=1, workers=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "mnist"},
            "name='mnist' is no known data set; use one of caltech256, photographs, d",
        ),
        ({"name": "deblur", "size": 2}, "size=2 is too small for deblur.*use 3 or more"),
        ({"name": "lowlight", "size": 0}, "size=0 is too small for lowlight.*use 2 or more"),
        ({"size": 3}, "size=3 is too small for caltech256.*use 4 or more"),
        ({"num_classes": 30}, "size=20 is too small .*'num_classes': 30.*use 60 or more"),
        ({"size": 999, "num_classes": 276}, "num_classes=276 is not possible .* use 2 to 275"),
        ({"num_classes": 1}, "num_classes=1 is not possible for caltech256; use 2 to 275"),
        ({"height": 64}, "height=64 is no option of caltech256; use num_classes"),
        ({"name": "deblur", "height": 8}, "height=8 is not possible for deblur; use 32 to 8192"),
        ({"name": "deblur", "format": "gif"}, "format='gif' is not possible .* use png or jpg"),
        ({"name": "cells", "dtype": "int8"}, "dtype='int8' is not .* use uint8 or uint16"),
        ({"name": "cells", "channels": 0}, "channels=0 is not possible .* use 1 to 64"),
        ({"workers": 0}, "workers=0 would write nothing; use 1 or more"),
        ({"seed": -1}, r"seed=-1 is out of range; use 0 to 2\*\*63 - 1"),
    ],
)
def test_bad_arguments_say_what_was_seen_and_what_to_use(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gen.generate(**{"name": "caltech256", "root": tmp_path / "x", "size": 20, **arguments})
    assert not (tmp_path / "x").exists()


def test_bad_shapes_kernels_and_images_are_refused() -> None:
    rng = gen.stream(0, 0)
    with pytest.raises(ValueError, match="shape='star' is unknown; use one of disc"):
        gen.dead_leaves(rng, 32, 32, shape="star")
    with pytest.raises(ValueError, match=r"size=4 has no centre.*use an odd size"):
        gen.shake_kernel(rng, 4)
    with pytest.raises(
        ValueError, match=r"kernel of size 9 .* image of 8x20; use a smaller kernel"
    ):
        gen.blur(np.zeros((8, 20, 3), np.uint8), gen.shake_kernel(rng, 9))


def test_command_line_passes_options_on_and_reports_errors_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        f"generate cells --root {tmp_path}/c --size 6 --num-classes 3 --channels 2 --workers 1"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    gen.main()
    names = files(tmp_path / "c")
    assert len(names) == 6
    assert tifffile.imread(tmp_path / "c" / next(iter(names))).shape == (50, 50, 2)

    monkeypatch.setattr(sys, "argv", [*command.split(), "--format", "png"])
    with pytest.raises(SystemExit, match="2"):
        gen.main()
    assert "format='png' is no option of cells" in capsys.readouterr().err
