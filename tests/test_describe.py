"""The first lines of a run say what goes in; what is likely a mistake is a warning."""

from pathlib import Path

import numpy as np
import pytest

from tests.images import loaders_of, make_photos, reading, save, save_tiff, smooth

FOLDERS = ["data=imagefolder", "data.val_count=4", "global_batch_size=2"]


def digits(root: Path) -> list[str]:
    for number in range(12):
        save(root / str(number % 2) / f"{number}.png", smooth(number, 28, 28)[..., 0])
    return [*FOLDERS, *reading(root)]


def photos(root: Path) -> list[str]:
    return [*FOLDERS, *reading(make_photos(root, 12))]


def cells(root: Path) -> list[str]:
    for number in range(12):
        image = np.full((40, 50, 5), number, np.uint16)
        save_tiff(root / str(number % 2) / f"{number}.tif", image)
    return ["data=cells", "data.val_count=4", "global_batch_size=2", *reading(root)]


def pairs(root: Path) -> list[str]:
    for number in range(8):
        for side in ("input", "target"):
            save(root / side / f"{number}.png", smooth(number, 40, 80))
    return ["data=pairs", "data.val_count=4", "global_batch_size=2", *reading(root)]


def masks(root: Path) -> list[str]:
    for number in range(8):
        save(root / "images" / f"{number}.png", smooth(number, 40, 40))
        mask = np.repeat(np.array([0, 128], np.uint8), 800).reshape(40, 40)
        save(root / "masks" / f"{number}.png", mask)
    return ["data=masks", "data.val_count=4", "global_batch_size=2", *reading(root)]


def memory(root: Path) -> list[str]:
    return ["data=mnist_mini"]


@pytest.mark.parametrize(
    ("kind", "options", "line", "warned"),
    [
        (memory, [], "28x28, 1 channel", ""),
        (
            *(digits, ["data.resize=256", "data.crop=224"]),
            "224x224, 3 channels: resized from 28x28 to 256x256, 224x224 cut (73.5% of the area), "
            "grey made RGB",
            "",
        ),
        (
            *(digits, ["data.crop=28"]),
            "28x28, 3 channels: resized from 28x28 to 256x256, 28x28 cut (1.1% of the area), grey "
            "made RGB",
            "data.crop=28 with data.resize=256 shows 1.1%",
        ),
        (digits, ["data.resize=null", "data.crop=28"], "28x28, 3 channels, grey made RGB", ""),
        (
            *(photos, ["data.resize=70", "data.crop=56", "data.random_resized_crop=[0.1,1]"]),
            "56x56, 3 channels: resized from 60-64x80 to 70x88-93, 56x56 cut (48.0% to 50.8% of "
            "the area), in training 10% to 100% of the area",
            "",
        ),
        (cells, [], "40x50, 5 channels of 16 bits", ""),
        (
            *(pairs, ["data.crop=16"]),
            "16x16, 3 channels: images of 40x80, 16x16 cut (8.0% of the area)",
            "",
        ),
        (
            *(pairs, ["data.crop=16", "data.random_crop=false"]),
            "16x16, 3 channels: images of 40x80, 16x16 cut (8.0% of the area)",
            "data.crop=16 with data.resize=null shows 8.0%",
        ),
        (masks, ["data.crop=null"], "40x40, 3 channels", "data.num_classes=129"),
        (masks, ["data.crop=null", "data.num_classes=129"], "40x40, 3 channels", ""),
    ],
)
def test_the_inputs_and_their_way_are_described(
    kind, options, line, warned, tmp_path: Path, caplog
) -> None:
    train, _ = loaders_of(*kind(tmp_path / "data"), *options)
    _, found = train.info.description
    assert found == f"inputs: {line}"
    assert warned in caplog.text
    assert bool(warned) == bool(caplog.text)


# part: dali
def test_the_images_that_dali_decodes_are_counted(tmp_path: Path) -> None:
    folders = photos(tmp_path / "data")
    for number in range(6):
        save(tmp_path / "data" / "a" / f"{number}.bmp", smooth(number, 60, 80))
    for options in (folders, cells(tmp_path / "cells"), ["data=mnist_mini"]):
        more = ["loader=dali", "data.resize=null", "data.crop=24"]
        train, _ = loaders_of(*options, *more)
        names = map(train.index.name_of, range(len(train.index)))
        count = sum(name.endswith("jpg") for name in names)
        expected = f"DALI decodes {count} of {len(train.index):,} samples"
        assert train.info.description[-1].partition(":")[0] == expected
