"""Foreign data, on a server or in a copied folder, is harmless and refused with its file's name."""

import io
import json
import pickle
import re
import shutil
import tracemalloc
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from conf.errors import UserError
from loaders.index import BadFileError
from loaders.pack import pack
from loaders.shards import StorageError
from tests.helpers import make_config, refused
from tests.images import loaders_of, make_photos, photos_in, save_index
from tests.servers import WebServer, bytes_in
from tests.shards import shard

EVIL: list[Any] = [None, True, -1, 0, 7, 4_000_000_000, 10**30, 1e300, "", "x", "../../victim"]
EVIL += ["é" * 5000, [], [[]], {}, {"": None}, ["../.."], [-1], ["/"]]
MOST_MEMORY = 30_000_000
"""Bytes, to read 20 photos of 3 KB."""
DATA_START = 128
"""Bytes of the headers of these NumPy files."""


class Harmful:
    """Pickled, what creates a file in the working directory where it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


# kind of data -> the overrides that read it in a folder or on a server
READS = {
    "shards": ["data.shuffle=window", "data.root={}"],
    "index": ["data.index={}"],
    "pack": ["loader=packed", "loader.pack={}"],
}


OPTIONS = ["data.val_count=4", "data.resize=30", "data.crop=[24,24]", "loader.num_threads=1"]
OPTIONS += ["data.retry_s=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Photos in shards, as an index and as a pack, beside a file that nobody may change."""
    folder = tmp_path_factory.mktemp("data")
    make_photos(folder / "photos", 20)
    data = make_config(*photos_in(folder / "photos", *OPTIONS)).data
    shard(data, folder / "shards")
    pack(data, folder / "pack")
    save_index(data, folder / "index")
    (folder / "victim").write_text("mine")
    return folder


def read(folder: Path, kind: str, root: object) -> None:
    """Read an epoch of both splits."""
    more = [override.format(root) for override in READS[kind]]
    for loader in loaders_of(*photos_in(folder / "photos", *OPTIONS, *more)):
        list(loader)


@pytest.mark.parametrize(
    "name",
    ["{}/victim", "index/train/../../../victim", "index/train/a.npy\n", "index/other/sizes.npy"],
)
def test_a_server_cannot_say_where_bytes_are_written(name: str, folder: Path, web) -> None:
    name = name.format(folder)
    web.files = bytes_in(folder / "shards")
    about = json.loads(web.files["shards.json"])
    about["columns"] = {name: {"size": 4, "crc32": zlib.crc32(b"evil")}, **about["columns"]}
    web.files |= {"shards.json": json.dumps(about).encode(), name.lstrip("/"): b"evil"}
    before = sorted(folder.rglob("*"))
    with refused(f"shards.json names {name!r}"):
        read(folder, "shards", web.url)
    assert (folder / "victim").read_text() == "mine"
    assert sorted(folder.rglob("*")) == before


def damage(folder: Path, random: Random) -> Path:
    """Change something in a file of an index, and return its path."""
    texts = [*folder.glob("*.json"), *folder.glob("**/facts.json")]
    columns = [path for path in folder.rglob("*.npy") if path.stat().st_size < 10_000]
    path = random.choice(sorted(random.choice([texts, columns])))
    content = bytearray(path.read_bytes())
    of_columns, of_texts = ["value", "array", "end", "bytes"], ["fact", "fact", "fact", "bytes"]
    match random.choice(of_texts if path in texts else of_columns):
        case "fact":  # a value, or a list without lists in it
            text = content.decode()
            found = random.choice([*re.finditer(r'(?<=[:\[,] )("[^"]*"|[\w.]+|\[[^][]*\])', text)])
            evil = json.dumps(random.choice(EVIL))
            content = bytearray(f"{text[: found.start()]}{evil}{text[found.end() :]}".encode())
        case "value":  # that no index has
            size = random.choice([4, 8])
            start = DATA_START + size * random.randrange((len(content) - DATA_START) // size)
            value = random.choice([0, 10_000, 2 ** (8 * size - 1) - 1, 2 ** (8 * size) - 1])
            content[start : start + size] = value.to_bytes(size, "little")
        case "array":  # of another shape or type, or with a pickle in it
            shape = random.choice([(10**12,), (10**6, 10**6), (0,), (), (-3,), (20, 2), (2**62, 4)])
            dtype = random.choice(["|u1", "<i8", "<f4", "|O", [("x", "<i8"), ("y", "|O")]])
            header = {"descr": dtype, "shape": shape, "fortran_order": False}
            np.lib.format.write_array_header_1_0(file := io.BytesIO(), header)
            content = bytearray(file.getvalue() + pickle.dumps(Harmful()) + content[DATA_START:])
        case "end":
            del content[random.randrange(len(content)) :]
        case "bytes":
            for _ in range(3):
                content[random.randrange(min(len(content), 200))] = random.randrange(256)
    path.write_bytes(content)
    return path


def serve(copy: Path, changed: Path, web: WebServer) -> str:
    """Serve shards with a changed file of the index, whose checksum fits; their address."""
    web.files, content = bytes_in(copy), changed.read_bytes()
    if changed.name != "shards.json":
        about = json.loads(web.files["shards.json"])
        facts = {"size": len(content), "crc32": zlib.crc32(content)}
        about["columns"][str(changed.relative_to(copy))] = facts
        web.files["shards.json"] = json.dumps(about).encode()
    return web.url


IMPOSSIBLE: list[Any] = [("order", ..., -1), ("order", ..., 10**6), ("starts", ..., -3)]
IMPOSSIBLE += [("spans-0", *span) for span in (("shard", -1), ("shard", 10**6), ("start", -5))]
IMPOSSIBLE += [("spans-0", "length", 2**32 - 1)]


@pytest.mark.parametrize(("name", "field", "value"), IMPOSSIBLE)
def test_an_impossible_place_is_refused_before_memory_is_asked_for(
    name: str, field: Any, value: int, folder: Path, web: WebServer
) -> None:
    shutil.rmtree(copy := folder / "copy", ignore_errors=True)
    shutil.copytree(folder / "shards", copy)
    path = copy / "index/train" / f"{name}.npy"
    column = np.load(path)
    column[field][...] = value
    np.save(path, column)
    for root in (copy, serve(copy, path, web)):
        tracemalloc.start(1)
        with pytest.raises((UserError, StorageError, BadFileError), match=f"{folder}|{web.url}"):
            read(folder, "shards", root)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_MEMORY


@pytest.mark.parametrize("kind", ["shards", "served shards", "index", "pack"])
def test_no_damage_writes_elsewhere_or_runs_code(kind: str, folder, web, monkeypatch) -> None:
    """Nor does it take much memory or end in a traceback."""
    kind, is_served = kind.removeprefix("served "), "served" in kind
    copy, random, refusals = folder / "copy", Random(7), []
    read(folder, kind, folder / kind)
    monkeypatch.chdir(folder)
    outside = {copy, folder / "cache", *folder.glob("*")}
    for _ in range(20):
        shutil.rmtree(copy, ignore_errors=True)
        path = damage(shutil.copytree(folder / kind, copy), random)
        root = serve(copy, path, web) if is_served else copy
        tracemalloc.start(1)
        try:
            read(folder, kind, root)
        except (UserError, StorageError, BadFileError) as error:
            refusals.append(str(error))
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < MOST_MEMORY, path
        assert set(folder.glob("*")) <= outside
        shutil.rmtree(folder / "cache", ignore_errors=True)
        assert (folder / "victim").read_text() == "mine"
    assert len(refusals) > 6
    for text in refusals:
        assert any(name in text for name in (str(folder), web.url, "photos/"))
        assert len(text.splitlines()) == 1
