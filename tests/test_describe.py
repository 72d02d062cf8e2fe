"""The first lines of a run say what goes in."""

import pytest

from tests.images import FOLDERS, common, loaders_of, make_photos, reading
from tests.kinds import KINDS
from tests.rows import rows

PAIRS = "16x16, 3 channels, 12.2% of images of 41-43x50"
MASKS = "40x56, 3 channels, 90.9% of images of 40-48x56"
FOUR = "global_batch_size=4"


def test_the_size_of_inputs_and_what_they_show_is_described(tmp_path) -> None:
    options = [*FOLDERS, *reading(make_photos(tmp_path / "photos", 12)), "data.val_count=4"]
    train, _ = loaders_of(*options, "global_batch_size=2", "data.resize=70", "data.crop=56")
    line = "inputs: 56x56, 3 channels, 49.6% of images of 60-64x80"
    assert train.info.description[1] == line


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("cells of 16 bits", [FOUR], "45x48, 5 channels of 16 bits"),
        *rows(
            ("pairs", ["data.crop=16", FOUR], PAIRS),
            ("masks", ["data.crop=[40,56]", FOUR, "data.num_classes=201"], MASKS),
            needs="data=pairs",
        ),
    ],
)
def test_inputs_of_all_layouts_are_described(kind, options, line, tmp_path) -> None:
    data = KINDS[kind](tmp_path / "data")
    train, _ = loaders_of(*data.options, *common(tmp_path / "data"), *options)
    assert train.info.description[1] == f"inputs: {line}"
