"""Packs of decoded images, and what is on disk of packs and shards: whole and right, or refused."""

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.index import BadFileError
from loaders.pack import pack
from tests.helpers import make_config, refused
from tests.images import index_of, loaders_of, make_photos, paths_in, photos_in, rot
from tests.rows import rows


def options_for(root: Path, *more: str) -> list[str]:
    return photos_in(root, "data.val_count=4", "data.crop=[24,24]", *more)


def test_a_pack_is_whole_or_refused_and_so_are_other_settings_and_data(tmp_path: Path) -> None:
    root, out = make_photos(tmp_path / "photos", 12), tmp_path / "out"
    options = options_for(root, "loader=packed", f"loader.pack={out}")
    fitting, other, huge = ([*options, f"data.resize={x}"] for x in (40, 48, "[5000000,5000000]"))
    with refused(f"out={out}: ", " GB"):
        pack(make_config(*huge).data, out)
    last = Path(paths_in(index_of(*fitting)[0])[-1])
    content = shutil.copy2(last, tmp_path / "copy.jpg")
    rot(str(last))
    with pytest.raises(BadFileError):  # the command ends in the middle
        pack(make_config(*fitting).data, out)
    with refused("is missing", "loaders.pack"):
        loaders_of(*fitting)
    shutil.copy2(content, last)
    pack(make_config(*fitting).data, out)
    sizes = np.load(out / "train/sizes.npy")
    assert len(sizes) == len(index_of(*fitting)[0])
    assert len(np.load(out / "train/pixels-0.npy")) == 3 * sizes.prod(axis=1).sum()
    with refused("data.resize=48 (there: 40)"):
        loaders_of(*other)
    with refused("out=DIR"):
        pack(make_config(*other).data, out)
    with refused("data.fold=1 (there: None)"):
        loaders_of(*fitting, "data.val_count=null", "data.fold=1")
    next(root.glob("a/*")).unlink()
    with refused("other files"):
        loaders_of(*fitting)
    shutil.rmtree(root)
    loaders_of(*fitting)


class Harmful:
    """Pickled, what ends the process that reads it."""

    def __reduce__(self) -> Any:
        return exit, (1,)


def pickled(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([Harmful()], object), allow_pickle=True)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def stored_in(folder: Path, options: list[str], form: str) -> list[str]:
    """Store the data as a pack or in shards, in a folder; returns the overrides that read them."""
    data = make_config(*options).data
    if form == "loaders.shards":
        import_module("loaders.shards").pack_shards(data, str(folder / "stored"), "0.02")
        return [*options, f"data.root={folder / 'stored'}"]
    pack(data, folder / "stored")
    return [*options, "loader=packed", f"loader.pack={folder / 'stored'}"]


@pytest.mark.parametrize("form", rows("a pack", "loaders.shards", needs="data=table"))
def test_what_is_stored_of_a_table_with_other_columns_is_refused(form: str, tmp_path: Path) -> None:
    root, table = make_photos(tmp_path / "photos", 9), tmp_path / "labels.csv"
    files = [path.relative_to(root) for path in root.glob("*/*")]
    table.write_text("\n".join(["path,one,two", *(f"{file},{file},{file}" for file in files)]))
    options = options_for(root, "data=table", f"data.table={table}", "data.label_columns=[one]")
    stored = stored_in(tmp_path, options, form)
    loaders_of(*stored)
    with refused("data.label_columns=['two'] (there: ['one'])"):
        loaders_of(*stored, "data.label_columns=[two]")


DESCRIPTIONS = [("a pack", "train/index.json"), *rows(("loaders.shards", "shards.json"))]


@pytest.mark.parametrize(("form", "name"), DESCRIPTIONS)
def test_a_missing_or_damaged_file_or_another_version_is_named(form, name, tmp_path: Path) -> None:
    """Of a pack, or of shards; and nothing that is read is a pickle."""
    photos, stored = make_photos(tmp_path / "photos", 9), tmp_path / "stored"
    options = stored_in(tmp_path, options_for(photos, "data.resize=30"), form)
    paths = [path for path in stored.rglob("*.*") if path.suffix[:3] in (".np", ".js")]
    assert len(paths) >= 3
    damages: list[Callable[[Path], None]] = [Path.unlink, cut_short, pickled]
    for path in paths:
        for damage in damages:
            if path.name == "shards.json" and damage is Path.unlink:
                continue  # a folder without it has no shards
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            kept = shutil.copy(path, tmp_path / "kept")
            damage(path)
            with refused(path.name):
                loaders_of(*options)
            shutil.copy(kept, path)
    text = (stored / name).read_text()
    (stored / name).write_text(text.replace('"format": ', '"format": 1'))
    with refused("another version"):
        loaders_of(*options)
