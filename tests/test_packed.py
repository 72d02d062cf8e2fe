"""Packs of decoded images, and what is on disk of packs and shards: whole and right, or refused."""

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.index import BadFileError
from loaders.layouts import open_index
from loaders.pack import pack
from tests.helpers import make_config, refused
from tests.images import index_of, loaders_of, make_photos, paths_in, photos_in, rot
from tests.rows import rows


def test_a_pack_is_whole_or_refused_and_so_is_one_of_other_data(tmp_path: Path) -> None:
    """test_keys.py has that of other settings."""
    root, out = make_photos(tmp_path / "photos", 12), tmp_path / "out"
    options = photos_in(root, "data.val_count=4", "loader=packed", f"loader.pack={out}")
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
    (out / ".train.tmp" / "killed").mkdir(parents=True)
    pack(make_config(*fitting).data, out)
    assert sorted(path.name for path in out.iterdir()) == ["train", "val"]
    with refused("out=DIR"):
        pack(make_config(*other).data, out)
    next(root.glob("a/*")).unlink()
    with refused("other files"):
        loaders_of(*fitting)
    shutil.rmtree(root)
    loaders_of(*fitting)
    with refused("data.leave_out=bad.txt", "the pack"):
        loaders_of(*fitting, "data.leave_out=bad.txt")


class Harmful:
    """Pickled, what ends the process that reads it."""

    def __reduce__(self) -> Any:
        return exit, (1,)


def pickled(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([Harmful()], object), allow_pickle=True)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("form", ["a pack", *rows("loaders.shards")])
def test_a_missing_or_damaged_file_or_another_version_is_named(form: str, tmp_path: Path) -> None:
    """Of a pack, or of shards; and nothing that is read is a pickle."""
    photos, stored = make_photos(tmp_path / "photos", 9), tmp_path / "stored"
    options = photos_in(photos, "data.val_count=4", "data.resize=30", "data.crop=[24,24]")
    data, name = make_config(*options).data, "train/index.json"
    if form == "loaders.shards":
        import_module(form).pack_shards(data, open_index(data), str(stored), "0.02")
        options, name = [*options, f"data.root={stored}"], "shards.json"
    else:
        pack(data, stored)
        options += ["loader=packed", f"loader.pack={stored}"]
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
