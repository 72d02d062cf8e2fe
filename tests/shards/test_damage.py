"""A pack or shards of another version, or with a damaged file, are refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.pack import pack
from tests.helpers import make_config, refused
from tests.images import loaders_of, make_photos, photos_in
from tests.shards import shard


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Photos in shards and as a pack."""
    folder = tmp_path_factory.mktemp("data")
    make_photos(folder / "photos", 20)
    data = make_config(*options_for(folder)).data
    shard(data, folder / "shards")
    pack(data, folder / "pack")
    return folder


def options_for(folder: Path, *more: str) -> list[str]:
    size = ["data.val_count=4", "data.resize=30", "data.crop=[24,24]"]
    return photos_in(folder / "photos", *size, *more)


class Harmful:
    """Pickled, what ends the process that reads it."""

    def __reduce__(self) -> Any:
        return exit, (1,)


def pickled(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([Harmful()], object), allow_pickle=True)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# kind of data -> overrides that read it in a folder, and its description there
KINDS = {
    "shards": (["data.root={}"], "shards.json"),
    "pack": (["loader=packed", "loader.pack={}"], "index.json"),
}


@pytest.mark.parametrize("damage", [Path.unlink, cut_short, pickled])
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_damaged_file_is_named(
    kind: str, damage: Callable[[Path], None], folder: Path
) -> None:
    options = options_for(folder, *(option.format(folder / kind) for option in KINDS[kind][0]))
    paths = [path for path in (folder / kind).rglob("*.*") if path.suffix[:3] in (".np", ".js")]
    assert len(paths) >= 4
    for path in paths:
        if path.name == "shards.json" and damage is Path.unlink:
            continue  # a folder without it has no shards
        shutil.rmtree(folder / "cache", ignore_errors=True)
        kept = shutil.copy(path, folder / "kept")
        damage(path)
        with refused(path.name):
            loaders_of(*options)
        shutil.copy(kept, path)
    description = folder / kind / KINDS[kind][1]
    text = description.read_text()
    description.write_text(text.replace('"format": ', '"format": 1'))
    with refused("another version"):
        loaders_of(*options)
    description.write_text(text)
