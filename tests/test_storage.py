"""Ranges of bytes from folders, web servers and buckets: whole and right, or an error that says the fix."""

import json
import logging
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conf.mistakes import Mistake, is_mistake
from conf.schema import DataConfig
from loaders import bucket
from loaders.storage import MissingError, Storage, StorageError, open_storage
from tests.servers import FAULTS, STALL_S, WebServer, bucket_server, web_server

CONTENT = np.random.default_rng(0).bytes(300_000)
KINDS = ("folder", "file", "web", "s3", "gs", "cached")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket_server() as url:
        yield url


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


def settings(tmp_path: Path, cache_gb: float = 0.0, retry_s: float = 5.0) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path / "cache"), cache_gb=cache_gb, retry_s=retry_s)


@pytest.fixture(params=KINDS)
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> Storage:
    """Storages of all kinds, in which lies nothing yet."""
    kind = request.param
    if kind == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    if kind == "gs":
        account = {"gcs_base_url": web.url, "disable_oauth": True, "private_key": "", "private_key_id": ""}
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account | {"client_email": ""}))
    root = {
        "folder": f"{tmp_path}/a folder",
        "file": f"file://{tmp_path}/a%20folder",
        "web": f"{web.url}/prefix/",
        "s3": f"s3://bucket/{tmp_path.name}",
        "gs": "gs://bucket/prefix",
        "cached": f"{web.url}/prefix",
    }[kind]
    return open_storage(root, settings(tmp_path, cache_gb=1.0 if kind == "cached" else 0.0))


def put(storage: Storage, name: str, content: bytes, folder: Path) -> None:
    (folder / "local").write_bytes(content)
    storage.write(name, folder / "local")


def test_what_was_written_is_read_by_ranges(storage: Storage, tmp_path: Path) -> None:
    assert not storage.exists("shards/a b.tar")
    put(storage, "shards/a b.tar", b"old", tmp_path)
    put(storage, "shards/a b.tar", CONTENT, tmp_path)
    put(storage, "empty", b"", tmp_path)
    storage = pickle.loads(pickle.dumps(storage))
    assert storage.exists("shards/a b.tar")
    assert storage.size("shards/a b.tar") == len(CONTENT)
    assert storage.size("empty") == 0
    assert storage.read_whole("shards/a b.tar") == CONTENT
    assert storage.read_whole("empty") == b""
    spans = [(0, 1), (7, 7), (299_999, 300_000), *((i, i + 1000) for i in range(0, 290_000, 1000))]
    begun = [storage.begin("shards/a b.tar", start, end) for start, end in spans]
    assert [each.result() for each in begun] == [CONTENT[start:end] for start, end in spans]


def test_what_is_not_there_is_an_error_at_once(storage: Storage, tmp_path: Path) -> None:
    put(storage, "a", CONTENT, tmp_path)
    began = time.monotonic()
    for read in (
        lambda: storage.read("b", 0, 1),
        lambda: storage.read_whole("b"),
        lambda: storage.size("b"),
    ):
        with pytest.raises(MissingError, match="/b.*; set data.root to") as missing:
            read()
        assert is_mistake(missing.value)
        assert not missing.value.may_pass
    for start, end in [(299_999, 300_001), (300_000, 300_001), (400_000, 400_001)]:
        with pytest.raises(StorageError, match="cut or written anew"):
            storage.read("a", start, end)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("cache_gb", [0.0, 1.0])
def test_no_fault_of_a_server_is_passed_on(
    fault: str, cache_gb: float, web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "PART", 100_000)
    monkeypatch.setattr(bucket, "STALL_S" if fault == "slow" else "TRY_S", STALL_S / 3)
    web.files["a"] = CONTENT
    storage = open_storage(web.url, settings(tmp_path, cache_gb))
    assert storage.size("a") == len(CONTENT)
    spans = [(0, 10), (1000, 101_000), (200_000, 300_000)]
    assert storage.read("a", 5, 6) == CONTENT[5:6] or cache_gb
    web.fault = lambda path, number: fault if number < 6 else None
    begun = [storage.begin("a", start, end) for start, end in spans]
    assert [each.result() for each in begun] == [CONTENT[start:end] for start, end in spans]
    assert len(web.requests) > 6
