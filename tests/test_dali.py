"""What DALI decodes and what it refuses; test_contract.py has its other promises."""

from pathlib import Path

import pytest

from loaders.index import BadFileError
from tests import images
from tests.images import common, loaders_of, save, smooth
from tests.test_describe import cells, photos


def test_the_images_that_dali_decodes_are_counted(tmp_path: Path) -> None:
    folders = photos(tmp_path / "data")
    for number in range(6):
        save(tmp_path / "data" / "a" / f"{number}.png", smooth(number, 60, 80), format="GIF")
    for options in (folders, cells(tmp_path / "cells"), ["data=mnist_mini"]):
        more = ["loader=dali", "data.resize=null", "data.crop=24"]
        train, _ = loaders_of(*options, *more)
        names = map(train.index.name_of, range(len(train.index)))
        count = sum(name.endswith("jpg") for name in names)
        expected = f"DALI decodes {count} of {len(train.index):,} samples"
        assert train.info.description[-1].partition(":")[0] == expected


def test_what_dali_refuses_is_named_once_and_decoded_all_the_same(tmp_path: Path, caplog) -> None:
    data = images.photos(tmp_path / "data")
    options = [*data.options, *common(tmp_path / "data"), "data.crop=[24,32]", "loader=dali"]
    options += ["data.random_crop=true", "global_batch_size=4"]
    for loader in loaders_of(*options):
        for epoch in range(2):  # each leaves out other samples
            loader.set_epoch(epoch)
            list(loader)
    for name in data.inputs:
        assert caplog.text.count(name) == ("stray" in name), name


def test_a_batch_whose_files_are_gone_is_named(tmp_path: Path) -> None:
    train, _ = loaders_of(*photos(tmp_path / "data"), "data.crop=24", "loader=dali")
    name = Path(train.index.name_of(0))
    for path in name.parent.parent.rglob("*.*"):
        path.unlink()
    with pytest.raises(BadFileError, match="No such file"):
        list(train)
