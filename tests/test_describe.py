"""The first lines of a run say what goes in; what is likely a mistake is a warning."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from conf.errors import counted
from loaders.targets import RegressionTargets
from tests.images import (
    FOLDERS,
    Data,
    common,
    loaders_of,
    make_photos,
    reading,
    save,
    save_tiff,
    smooth,
)
from tests.parts import rows_of

OPTIONS = [*FOLDERS, "data.val_count=4", "global_batch_size=2"]
CELLS = "40x50, 5 channels of 16 bits"


def digits(root: Path) -> list[str]:
    for number in range(12):
        save(root / str(number % 2) / f"{number}.png", smooth(number, 28, 28)[..., 0])
    return [*OPTIONS, *reading(root)]


def photos(root: Path) -> list[str]:
    return [*OPTIONS, *reading(make_photos(root, 12))]


def cells(root: Path) -> list[str]:
    for number in range(12):
        image = np.full((40, 50, 5), number, np.uint16)
        save_tiff(root / str(number % 2) / f"{number}.tif", image)
    return ["data=cells", "data.val_count=4", "global_batch_size=2", *reading(root)]


def written(kind: Callable[[Path], Data], root: Path) -> list[str]:
    return [*kind(root).options, *common(root)]


def memory(root: Path) -> list[str]:
    return ["data=mnist_mini"]


@pytest.mark.parametrize(
    ("kind", "options", "line", "warned"),
    [
        (memory, [], "28x28, 1 channel", ""),
        (
            *(digits, ["data.resize=256", "data.crop=224"]),
            "224x224, 3 channels: resized from 28x28 to 256x256, 224x224 cut (73.5% of the area)",
            "",
        ),
        (
            *(digits, ["data.crop=28"]),
            "28x28, 3 channels: resized from 28x28 to 256x256, 28x28 cut (1.1% of the area)",
            "data.crop=28 with data.resize=256 shows 1.1%",
        ),
        (digits, ["data.resize=null", "data.crop=28"], "28x28, 3 channels", ""),
        (
            *(photos, ["data.resize=70", "data.crop=56", "data.random_resized_crop=[0.1,1]"]),
            "56x56, 3 channels: resized from 60-64x80 to 70x88-93, 56x56 cut (48.0% to 50.8% of "
            "the area), in training 10% to 100% of the area",
            "",
        ),
        (cells, ["data.hflip=0", "data.vflip=0.25"], f"{CELLS}: 25% flipped upside-down", ""),
        (cells, ["data.hflip=0", "data.vflip=0"], CELLS, ""),
        *((partial(written, kind), *row) for kind, *row in rows_of("DESCRIBED")),
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


def test_one_thing_has_no_plural() -> None:
    told = [counted(number, name) for number in (0, 1, 2000) for name in ("step", "class")]
    assert told == ["0 steps", "0 classes", "1 step", "1 class", "2,000 steps", "2,000 classes"]
    ages = RegressionTargets(np.zeros((3, 1), np.float32), ("age",))
    assert ages.describe() == "1 number (age)"
