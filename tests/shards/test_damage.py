"""A pack or shards of another version, or with a damaged file, are refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from conf.schema import Config
from loaders import build_loaders
from loaders.pack import pack
from tests.helpers import make_config, replace
from tests.images import make_photos, photos_in
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


def emptied(path: Path) -> None:
    path.write_text("[]")


DAMAGES: list[Callable[[Path], None]] = [Path.unlink, cut_short, pickled, emptied]
# kind of data -> overrides that read it in a folder, and its description there
KINDS = {
    "shards": (["data.root={}"], "shards.json"),
    "pack": (["loader=packed", "loader.pack={}"], "index.json"),
}


def config_of(folder: Path, kind: str) -> Config:
    return make_config(*options_for(folder, *(x.format(folder / kind) for x in KINDS[kind][0])))


def refusal_of(cfg: Config, folder: Path) -> str:
    """The message, of one line, with which data in a folder is refused."""
    with pytest.raises(UserError) as error:
        build_loaders(cfg, torch.device("cpu"))
    assert len(str(error.value).splitlines()) == 1
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_damaged_file_is_named(kind: str, damage, folder: Path) -> None:
    cfg = config_of(folder, kind)
    paths = [*(folder / kind).rglob("*.npy"), *(folder / kind).rglob("*.json")]
    assert len(paths) >= 11
    for path in paths:
        if kind == "shards" and path.name == "distinct_sizes.npy":
            continue  # those of all shards are counted anew
        shutil.rmtree(folder / "cache", ignore_errors=True)
        kept = shutil.copy(path, folder / "kept")
        damage(path)
        assert path.parent.name in refusal_of(cfg, folder / kind)
        shutil.copy(kept, path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_version_wrote_is_refused(kind: str, folder: Path) -> None:
    path = folder / kind / KINDS[kind][1]
    text = path.read_text()
    replace(path, '"format": ', '"format": 1')
    assert "another version" in refusal_of(config_of(folder, kind), folder / kind)
    path.write_text(text)
