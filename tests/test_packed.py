"""Packs of decoded images."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from loaders.index import BadFileError
from loaders.pack import DONE, pack
from tests.helpers import make_config, refused
from tests.images import FOLDERS, index_of, loaders_of, make_photos, paths_in, reading, rot


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Those that read 12 photos in three class folders."""
    return [*FOLDERS, *reading(make_photos(tmp_path / "photos", 12))]


def test_packing_goes_on_where_it_was_stopped(options: list[str], tmp_path: Path) -> None:
    options += ["data.resize=40", "data.crop=[32,32]", "data.val_count=4"]
    data, whole, stopped = make_config(*options).data, tmp_path / "whole", tmp_path / "stopped"
    pack(data, whole)
    files = paths_in(index_of(*options)[0])
    first, last = Path(files[0]), Path(files[-1])
    content, changed_ns = last.read_bytes(), last.stat().st_mtime_ns
    rot(str(last))
    with pytest.raises(BadFileError):
        pack(data, stopped, chunk=1)
    with refused("is missing", "loaders.pack"):
        loaders_of(*options, "loader=packed", f"loader.pack={stopped}")
    last.write_bytes(content)
    os.utime(last, ns=(changed_ns, changed_ns))
    rot(str(first))  # which is not read a second time
    pack(data, stopped)
    for name in ("train/pixels-0.npy", "val/pixels-0.npy"):
        assert np.array_equal(np.load(whole / name), np.load(stopped / name))


def test_pixels_are_on_the_disk_before_they_count_as_done(options, tmp_path, monkeypatch) -> None:
    """Else a machine that fails leaves images of zeros in a pack that goes on behind them."""
    flush = np.memmap.flush
    counts: list[int] = []

    def watched(array: np.memmap) -> None:
        file = Path(str(array.filename))
        if file.name == "pixels-0.npy":
            counts.append(int(np.load(file.with_name(DONE)).sum()))
        flush(array)

    monkeypatch.setattr(np.memmap, "flush", watched)
    pack(make_config(*options, "data.resize=40", "data.val_count=4").data, tmp_path, chunk=3)
    assert counts == [0, 3, 6, 0, 3]


def test_a_pack_for_which_there_is_no_room_is_refused(options, tmp_path: Path) -> None:
    data, out = make_config(*options, "data.resize=[5000000,5000000]").data, tmp_path / "out"
    with refused(f"out={out}: ", " GB"):
        pack(data, out)
    assert sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) < 1e6


def test_a_pack_is_refused_with_other_settings_or_data(options, tmp_path: Path) -> None:
    out, root = tmp_path / "out", tmp_path / "photos"
    options += ["data.crop=[32,32]", "global_batch_size=4", "loader=packed", f"loader.pack={out}"]
    fitting, other = ([*options, f"data.resize={size}"] for size in (40, 48))
    pack(make_config(*fitting).data, out)
    with refused("data.resize=48 (there: 40)"):
        loaders_of(*other)
    with refused("out=DIR"):
        pack(make_config(*other).data, out)
    with refused("data.fold=1 (there: None)"):
        loaders_of(*fitting, "data.fold=1")
    next(root.glob("a/*")).unlink()
    with refused("other files"):
        loaders_of(*fitting)
    shutil.rmtree(root)
    loaders_of(*fitting)
