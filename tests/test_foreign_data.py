"""Data from somebody else, on a server or in a copied folder: refused with its file's name, and harmless."""

import json
import os
import pickle
import shutil
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from loaders.image_loaders import build_loaders
from loaders.index import SPLITS, BadFileError, build_index, write_index
from loaders.pack import pack
from loaders.shards import Part, pack_shards
from loaders.storage import StorageError
from tests.helpers import make_config
from tests.images import make_photos
from tests.servers import WebServer, web_server

MOST_BYTES = 30_000_000
"""Of memory that reading 20 photos of 3 KB may ask for."""
EVIL: list[Any] = [
    None,
    True,
    -1,
    0,
    7,
    4_000_000_000,
    10**30,
    1e300,
    "",
    "x",
    "../../victim",
    "é" * 5000,
]
EVIL += [[], [[]], {}, {"": None}, ["../.."], [-1], ["/"]]


class Harmful:
    """Pickled, what creates a file where it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


class Place:
    """A data set on disk, in shards, as an index and as a pack, each of which can be damaged and read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.copy = folder, folder / "copy"
        make_photos(folder / "photos", 20)
        options = [
            *("data=imagefolder", f"data.root={folder / 'photos'}", "data.val_count=4"),
            *("data.resize=30", "data.crop=[24,24]", "global_batch_size=4", "loader.num_threads=1"),
            *(f"data.cache_dir={folder / 'cache'}", "data.retry_s=0"),
        ]
        data = make_config(*options).data
        pack_shards(data, str(folder / "shards"), 0.02, Part(1, 1))
        pack(data, folder / "pack")
        write_index(dict(zip(SPLITS, build_index(data), strict=True)), data, folder / "index")
        (folder / "victim").write_text("mine")
        more = {
            "shards": ["data.shuffle=window"],
            "index": [],
            "pack": ["loader=packed", "loader.pack=x"],
        }
        self.config_of = {kind: make_config(*options, *more[kind]) for kind in more}

    def error_of(self, kind: str, root: str) -> Exception | None:
        """What ends an epoch of both splits early."""
        cfg = self.config_of[kind]
        if kind == "pack":
            cfg.loader.pack = root
        elif kind == "index":
            cfg.data.index = root
        else:
            cfg.data.root = root
        try:
            for loader in build_loaders(cfg, torch.device("cpu")):
                for _ in loader:
                    pass
        except (UserError, StorageError, BadFileError) as error:
            return error
        return None


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("data"))


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


def serve(folder: Path, web: WebServer) -> None:
    files = (path for path in folder.rglob("*") if path.is_file())
    web.files = {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "name",
    [
        *("{folder}/victim", "../victim", "index/train/../../../victim", "index/train/a.npy\n"),
        *("index/train/", "index/train/sizes.npy/x", "index/other/sizes.npy", "index\\train\\a.npy", ""),
    ],
)  # fmt: skip
def test_a_server_cannot_say_where_its_bytes_are_written(
    name: str, place: Place, web: WebServer
) -> None:
    name = name.format(folder=place.folder)
    serve(place.folder / "shards", web)
    about = json.loads(web.files["shards.json"])
    about["columns"] = {name: {"size": 4, "crc32": zlib.crc32(b"evil")}, **about["columns"]}
    web.files |= {"shards.json": json.dumps(about).encode(), name.lstrip("/"): b"evil"}
    before = sorted(place.folder.rglob("*"))
    error = place.error_of("shards", web.url)
    assert isinstance(error, UserError)
    assert f"shards.json names {name!r}" in str(error)
    assert (place.folder / "victim").read_text() == "mine"
    assert sorted(place.folder.rglob("*")) == before


@pytest.mark.parametrize("name", [b"../../victim", b"/etc/hostname", b"a/../../b"])
def test_an_index_cannot_lead_out_of_the_data(name: bytes, place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.folder / "index", tmp_path / "index")
    path = tmp_path / "index" / "train" / "names-0.npy"
    names = np.load(path)
    names[0] = name
    np.save(path, names)
    error = place.error_of("index", str(tmp_path / "index"))
    assert isinstance(error, UserError)
    assert name.decode()[:12] in str(error)


@pytest.mark.parametrize("kind", ["shards", "index", "pack"])
@pytest.mark.parametrize("make", [Path.symlink_to, lambda path, _: os.mkfifo(path)])
def test_a_column_that_is_no_regular_file_is_refused(
    kind: str, make: Any, place: Place, tmp_path: Path
) -> None:
    root = shutil.copytree(place.folder / kind, tmp_path / kind)
    path = next(root.glob("**/train/sizes.npy"))
    path.rename(tmp_path / "sizes.npy")
    make(path, tmp_path / "sizes.npy")
    error = place.error_of(kind, str(root))
    assert isinstance(error, UserError)
    assert str(path) in str(error)


def damage(path: Path, random: np.random.Generator) -> None:
    """Change something in a file of an index."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".json" and random.random() < 0.9:
        facts = json.loads(content)
        inside = facts
        while True:  # go down to any depth
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            key = keys[random.integers(len(keys))]
            if not (isinstance(inside[key], dict | list) and inside[key]) or random.random() < 0.2:
                break
            inside = inside[key]
        if random.random() < 0.2:
            del inside[key]
        elif isinstance(inside, dict) and random.random() < 0.2:
            inside["../../victim"] = inside.pop(key)
        else:
            inside[key] = EVIL[random.integers(len(EVIL))]
        path.write_text(json.dumps(facts))
        return
    kind = random.integers(4) if path.suffix == ".npy" else 3
    if kind == 0:  # values that no index has
        array = np.load(path)
        parts = [array[name] for name in array.dtype.names] if array.dtype.names else [array]
        part = parts[random.integers(len(parts))].reshape(-1)
        if part.dtype.kind == "S":  # names
            part[0] = (b"../../victim", b"/etc/hostname", b"\0\xff")[random.integers(3)]
        elif len(part) and part.dtype.kind in "iu":
            limits = np.iinfo(part.dtype)
            values = [limits.min, limits.max, limits.max // 2, 0, 10_000]
            part[random.integers(len(part))] = values[random.integers(len(values))]
        np.save(path, array)
    elif kind == 1:  # another array
        shapes = [(10**12,), (10**6, 10**6), (0,), (), (-3,), (20, 2), (2**62, 4)]
        kinds = ["|u1", "<i8", "<i4", "<f4", "|O", [("x", "<i8"), ("y", "|O")]]
        header = {"descr": kinds[random.integers(6)], "shape": shapes[random.integers(7)]}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header | {"fortran_order": False})
            file.write(pickle.dumps(Harmful()) + content[128:])
    elif kind == 2:
        path.write_bytes(content[: random.integers(len(content))])
    else:
        for at in random.integers(0, min(len(content), 200), 3):
            content[at] = random.integers(256)
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["shards", "served shards", "index", "pack"])
def test_no_damage_writes_elsewhere_runs_code_takes_memory_or_ends_in_a_traceback(
    kind: str, place: Place, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, is_served = kind.removeprefix("served "), "served" in kind
    random, num_refused = np.random.default_rng(7), 0
    assert place.error_of(kind, str(place.folder / kind)) is None
    monkeypatch.chdir(place.folder)
    outside = {*place.folder.glob("*"), place.copy}
    for _ in range(80):
        shutil.rmtree(place.copy, ignore_errors=True)
        shutil.copytree(place.folder / kind, place.copy)
        files = [*place.copy.glob("*.json"), *place.copy.glob("**/facts.json")]
        columns = [path for path in place.copy.rglob("*.npy") if path.stat().st_size < 10_000]
        files = sorted(files if random.random() < 0.5 else columns)
        path = files[random.integers(len(files))]
        damage(path, random)
        if is_served and path.name != "shards.json":  # or the checksum would tell
            about, content = json.loads((place.copy / "shards.json").read_text()), path.read_bytes()
            facts = {"size": len(content), "crc32": zlib.crc32(content)}
            about["columns"][str(path.relative_to(place.copy))] = facts
            (place.copy / "shards.json").write_text(json.dumps(about))
        serve(place.copy, web)
        tracemalloc.start(1)
        error = place.error_of(kind, web.url if is_served else str(place.copy))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES, path
        if error is not None:
            num_refused += 1
            named = (str(place.folder), web.url, "photos/")
            assert any(name in str(error) for name in named), repr(error)
            assert len(str(error).splitlines()) == 1
        shutil.rmtree(place.folder / "cache")
        os.makedirs(place.folder / "cache")
        assert set(place.folder.glob("*")) == outside
        assert (place.folder / "victim").read_text() == "mine"
    assert num_refused > 40
    assert not (place.folder / "harm").exists()
