"""An index on disk is the one that going through the data set gives, and is enough to start from."""

import mmap
import os
import pickle
import shutil
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from conf.schema import DataConfig
from loaders.image_loaders import build_loaders
from loaders.index import (
    DATASETS,
    SPLITS,
    BadFileError,
    BadHeadersError,
    Index,
    build_index,
    images_below,
    kept_headers,
    scan_headers,
    share,
)
from loaders.index import write_index as write_indexes
from loaders.targets import describe_target
from tests.helpers import make_config
from tests.test_index import opening

CPU = torch.device("cpu")
COUNT = 12


def image(number: int, directory: Path, ending: str, mode: str = "RGB") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    channels = {"RGB": (3,), "L": ()}[mode]
    pixels = np.random.default_rng(number).integers(0, 3, (20, 24 + number % 2, *channels))
    path = directory / f"ünï {number}.{ending}"
    if ending == "tif":
        pixels = np.full((20, 24, 5), number, np.uint16)
        tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig")
    else:
        Image.fromarray(pixels.astype(np.uint8)).save(path)


def imagefolder(root: Path, ending: str = "jpg") -> list[str]:
    for number in range(COUNT):
        image(number, root / "ab"[number % 2], ending)
    return ["data=imagefolder"]


def cells(root: Path) -> list[str]:
    imagefolder(root, "tif")
    return ["data=cells", "data.mean=null", "data.std=null"]


def pairs(root: Path) -> list[str]:
    for number in range(COUNT):
        image(number, root / "input", "png")
        image(number, root / "target", "jpg")
    return ["data=pairs"]


def masks(root: Path) -> list[str]:
    for number in range(COUNT):
        image(number, root / "images", "jpg")
        image(number, root / "masks", "png", "L")
    return ["data=masks"]


def table(root: Path) -> list[str]:
    for number in range(COUNT):
        image(number, root, "jpg")
    lines = [f"ünï {number}.jpg,{number / 2}" for number in range(COUNT)]
    root.with_suffix(".csv").write_text("\n".join(["path,label", *lines]))
    return ["data=table", f"data.table={root.with_suffix('.csv')}"]


def options_for(layout: Any, folder: Path, *more: str) -> list[str]:
    root = folder / "images"
    root.mkdir()
    return [
        *(
            *layout(root),
            f"data.root={root}",
            f"data.cache_dir={folder / 'cache'}",
            "data.val_count=3",
        ),
        *("data.resize=null", "data.crop=[16,16]", "global_batch_size=3", *more),
    ]


def write_index(data: DataConfig, out: Path) -> None:
    write_indexes(dict(zip(SPLITS, DATASETS[data.layout](data), strict=True)), data, out)


def facts_of(index: Index) -> dict[str, Any]:
    names = ("name", "channels", "dtype", "keep_channels", "resized", "left_out", "sides", "is_raw")
    facts = {name: getattr(index, name) for name in (*names, "fingerprint")}
    arrays = [index.sizes, index.distinct_sizes, *index.headers]
    arrays += [getattr(index.target, "values", np.zeros(0))]
    paths = [list(paths) for paths in index.files]
    return {
        **facts,
        "paths": paths,
        "target": describe_target(index.target),
        "arrays": [array.tolist() for array in arrays],
    }


def is_mapped(array: Any) -> bool:
    """Whether an array lies in a file, whose memory all processes share."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


@pytest.mark.parametrize("layout", [imagefolder, cells, pairs, masks, table])
def test_it_is_the_index_that_the_layout_makes_also_when_the_data_has_moved(
    layout, tmp_path
) -> None:
    options = options_for(layout, tmp_path)
    out = tmp_path / "index"
    made = build_index(make_config(*options).data)
    write_index(make_config(*options).data, out)
    opened = build_index(make_config(*options, f"data.index={out}").data)
    for index, other in zip(opened, made, strict=True):
        assert "fingerprint" in vars(index)  # known, not worked out again
        assert facts_of(index) == facts_of(other)
        for mapped in (index, share(other, tmp_path / "made")):
            call = ForkingPickler.dumps(mapped)
            assert len(call) < 1000
            found = pickle.loads(call)  # as in a worker process
            assert facts_of(found) == facts_of(other)
            assert all(
                map(is_mapped, [found.sizes, *found.headers, *(p.names for p in found.files)])
            )
        shutil.rmtree(tmp_path / "made")
    moved = shutil.move(tmp_path / "images", tmp_path / "elsewhere" / "images")
    [train, _] = build_loaders(
        make_config(*options, f"data.root={moved}", f"data.index={out}"), CPU
    )
    assert train.index.name_of(0).startswith(str(moved))
    assert sum(len(inputs) for inputs, _ in train) == COUNT - 3
    assert train.state_dict()["plan"]["files"] == made[0].fingerprint


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    options = options_for(imagefolder, tmp_path, f"data.index={tmp_path / 'index'}")
    write_index(make_config(*options).data, tmp_path / "index")
    return options


@pytest.mark.parametrize("loader", ["pytorch", "dali"])
def test_a_start_without_a_look_at_files_names_one_that_changed_when_it_is_read(
    loader: str, photos, tmp_path, monkeypatch
) -> None:
    changed = tmp_path / "images" / "a" / "ünï 0.jpg"
    image(1, changed.parent, "jpg")
    shutil.copy(changed.with_name("ünï 1.jpg"), changed)
    touched: list[str] = []
    for name in ("stat", "scandir"):
        original = getattr(os, name)

        def look(path: Any = ".", *arguments: Any, original: Any = original, **named: Any) -> Any:
            touched.extend([str(path)] if str(tmp_path / "images") in str(path) else [])
            return original(path, *arguments, **named)

        monkeypatch.setattr(os, name, look)
    options = [*photos, "data.check_files=false", f"loader={loader}"]
    both = build_loaders(make_config(*options), CPU)
    assert touched == []
    with pytest.raises(BadFileError, match=f"{changed} has changed .* when it was indexed"):
        for each in both:
            list(each)


def test_a_file_that_changed_or_is_gone_is_named_at_start(photos, tmp_path) -> None:
    for number in (0, 2):
        (tmp_path / "images" / "a" / f"ünï {number}.jpg").write_bytes(b"")
    (tmp_path / "images" / "b" / "ünï 1.jpg").unlink()
    with pytest.raises(
        ValueError, match="[12] samples of images/.* has changed .* make it again: "
    ):
        build_index(make_config(*photos).data)
    build_index(make_config(*photos, "data.on_error=skip").data)  # and leaves them out when read


def test_known_files_are_not_looked_at_where_no_index_is_given(tmp_path, monkeypatch) -> None:
    options = [*options_for(imagefolder, tmp_path), "data.check_files=false"]
    looked_at: set[str] = set()
    original = os.stat

    def look(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(".jpg"):
            looked_at.add(str(path))
        return original(path, **options)

    monkeypatch.setattr(os, "stat", look)
    before = build_index(make_config(*options).data)
    assert len(looked_at) == COUNT
    looked_at.clear()
    image(COUNT, tmp_path / "images" / "a", "jpg")
    after = build_index(make_config(*options).data)
    assert looked_at == {str(tmp_path / "images" / "a" / f"ünï {COUNT}.jpg")}
    assert sum(map(len, after)) == sum(map(len, before)) + 1


def test_an_indexing_that_was_stopped_goes_on_and_leaves_nothing_behind(tmp_path) -> None:
    data, out = make_config(*options_for(imagefolder, tmp_path)).data, tmp_path / "index"
    files = images_below(tmp_path / "images")
    read: list[str] = []

    def listen(path: str) -> None:
        if path.endswith(".jpg"):
            if len(read) == 7:
                raise KeyboardInterrupt
            read.append(path)

    with pytest.raises(KeyboardInterrupt), opening(listen):
        scan = partial(scan_headers, data, "rgb")
        kept_headers(scan, data, "rgb", files, at_once=3)
    assert read == files[:7]
    read.clear()
    with opening(listen):
        write_index(data, out)
    assert read == files[6:]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["cache", "images", "index"]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
    (tmp_path / "images" / "a" / "ünï 0.jpg").write_text("no image")
    with pytest.raises(BadHeadersError, match="1 of 12 files"):
        write_index(data, out)
    data.index, data.check_files = str(out), False
    assert sum(map(len, build_index(data))) == COUNT  # the one from before


def test_an_index_that_is_in_use_is_replaced_and_its_user_goes_on(photos, tmp_path) -> None:
    before, _ = build_index(make_config(*photos).data)
    names = list(before.files[0])
    for number in range(COUNT, 2 * COUNT):
        image(number, tmp_path / "images" / "a", "jpg")
    write_index(make_config(*photos).data, tmp_path / "index")
    assert list(before.files[0]) == names
    assert sum(map(len, build_index(make_config(*photos).data))) == 2 * COUNT


def test_what_is_no_fitting_index_is_refused(photos, tmp_path) -> None:
    with pytest.raises(ValueError, match="other settings: data.val_count=4 \\(there: 3\\)"):
        build_index(make_config(*photos, "data.val_count=4").data)
    nowhere = tmp_path / "images"
    with pytest.raises(ValueError, match="is no index; make it: python -m loaders.index da"):
        build_index(make_config(*photos, f"data.index={nowhere}").data)
    with pytest.raises(ValueError, match="holds no index; choose another out=DIR"):
        write_index(make_config(*photos).data, nowhere)
    with pytest.raises(ValueError, match="data=mnist_mini is not made of image files"):
        write_index(make_config().data, tmp_path / "new")
    assert not (tmp_path / "new").exists()
