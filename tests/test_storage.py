"""Ranges of bytes from folders, web servers and buckets: whole and right, or an error that says the fix."""

import json
import multiprocessing
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
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
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A web server that is read in small parts, and tried again soon."""
    monkeypatch.setattr(bucket, "PART", 100_000)
    monkeypatch.setattr(bucket, "FIRST_PAUSE_S", 0.02)
    with web_server() as server:
        yield server


def settings(tmp_path: Path, cache_gb: float = 0.0, retry_s: float = 60.0) -> DataConfig:
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
        account = {
            "gcs_base_url": web.url,
            "disable_oauth": True,
            "private_key": "",
            "private_key_id": "",
        }
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
    assert storage.read("shards/a b.tar", 0, 3) == b"old"
    put(storage, "shards/a b.tar", CONTENT, tmp_path)
    assert storage.read("shards/a b.tar", 0, 250_000) == CONTENT[:250_000]
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
    monkeypatch.setattr(bucket, "STALL_S" if fault == "slow" else "TRY_S", STALL_S / 3)
    web.files["a"] = web.files["b"] = CONTENT
    storage = open_storage(web.url, settings(tmp_path, cache_gb))
    assert storage.read("b", 5, 6) == CONTENT[5:6]
    web.fault = lambda path, number: fault if path == "a" and number < 5 else None
    spans = [(0, 10), (1000, 101_000), (200_000, 300_000), (7, 7)]
    begun = [storage.begin("a", start, end) for start, end in spans]
    assert [each.result() for each in begun] == [CONTENT[start:end] for start, end in spans]
    assert web.numbers["a"] >= (5 if fault in ("500", "503", "reset") else 4)
    number = web.numbers["a"]  # from now on they are asked for in one call
    web.fault = lambda path, n: fault if number + 1 < n < number + 4 else None
    begun = [storage.begin("a", start, end) for start, end in 4 * spans[:3]]
    assert [each.result() for each in begun] == [CONTENT[start:end] for start, end in 4 * spans[:3]]


def test_a_server_that_stays_away_is_named_without_credentials(
    web: WebServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket, "STALL_S", STALL_S / 3)
    monkeypatch.setattr(bucket, "TRY_S", STALL_S / 2)
    root = web.url.replace("//", "//who:secret@") + "/folder?signature=secret"
    web.files["folder/a"] = CONTENT
    data = settings(tmp_path, retry_s=0.1)
    assert open_storage(root, data).read("a", 0, 4) == CONTENT[:4]
    assert web.requests == [("GET", "/folder/a?signature=secret", "Basic d2hvOnNlY3JldA==")]
    messages = {}
    for fault in (*FAULTS, "401", "403", "404", "408", "429", "416", "400"):
        web.fault = partial(lambda fault, path, number: fault, fault)
        with pytest.raises(StorageError) as away:
            open_storage(root, data).read("a", 0, 300_000)
        messages[fault] = str(away.value)
        assert away.value.may_pass == (fault in (*FAULTS[:-1], "408", "429")), away.value
        assert ("tried" in messages[fault]) == away.value.may_pass
        shown = "".join(traceback.format_exception(away.value)) + caplog.text
        assert "secret" not in shown
        assert "who" not in shown
        assert messages[fault].startswith(f"{web.url}/folder/a")
        assert len(messages[fault].splitlines()) == 1
    assert "500 Internal Server Error, tried" in messages["500"]
    assert "data.retry_s=0.1" in messages["500"]
    assert "ranges of bytes" in messages["whole"]
    assert "USER:PASSWORD" in messages["403"]
    web.close()
    with pytest.raises(StorageError, match="Connection refused.*tried"):
        open_storage(root, data).read("a", 0, 4)


def test_a_server_that_comes_back_in_time_is_no_error(web: WebServer, tmp_path: Path) -> None:
    web.files["a"] = CONTENT
    storage = open_storage(web.url, settings(tmp_path))
    assert storage.size("a") == len(CONTENT)
    web.close()
    begun = [storage.begin("a", start, start + 100) for start in range(100)]
    time.sleep(0.2)
    assert not any(each.done() for each in begun)
    web.reopen()
    assert [each.result() for each in begun] == [CONTENT[i : i + 100] for i in range(100)]


@pytest.mark.parametrize("cache_gb", [0.0, 1.0])
@pytest.mark.parametrize("other", [CONTENT[::-1], CONTENT + b"more"])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    cache_gb: float, other: bytes, web: WebServer, tmp_path: Path
) -> None:
    web.files["a"] = CONTENT

    def change(path: str, number: int) -> None:
        if number == 2:
            web.files["a"] = other

    web.fault = change
    storage = open_storage(web.url, settings(tmp_path, cache_gb))
    with pytest.raises(StorageError, match="has changed since this run began"):
        for start in range(10):
            storage.read("a", start, start + 1)
    web.fault = lambda path, number: None
    storage = open_storage(web.url, settings(tmp_path, cache_gb))
    assert storage.read_whole("a") == other


def test_many_ranges_are_in_flight_and_none_waits_for_another(tmp_path: Path) -> None:
    with web_server(latency_s=0.1) as web:
        web.files["a"] = CONTENT
        may_answer = threading.Event()

        def keep_the_first_waiting(path: str, number: int) -> None:
            if number == 0:
                may_answer.wait(60)

        web.fault = keep_the_first_waiting
        storage = open_storage(web.url, settings(tmp_path))
        slow = storage.begin("a", 0, 100)
        time.sleep(0.05)
        begun = [storage.begin("a", start, start + 100) for start in range(200)]
        assert [each.result() for each in begun] == [CONTENT[i : i + 100] for i in range(200)]
        assert not slow.done()
        assert web.most_at_once > 30
        may_answer.set()
        assert slow.result() == CONTENT[:100]


def test_a_forked_process_says_that_it_cannot_read(web: WebServer, tmp_path: Path) -> None:
    web.files["a"] = CONTENT
    storage = open_storage(web.url, settings(tmp_path))
    storage.read("a", 0, 1)
    process = multiprocessing.get_context("fork").Process(
        target=_expect_to_be_told, args=(storage,)
    )
    process.start()
    process.join(20)
    assert process.exitcode == 0


def _expect_to_be_told(storage: Storage) -> None:
    with pytest.raises(RuntimeError, match="use multiprocessing's spawn or forkserver"):
        storage.read("a", 0, 1)


def test_a_root_that_cannot_be_read_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        Mistake, match="ftp://host: ftp:// cannot be read; use a folder or one of http"
    ):
        open_storage("ftp://user:secret@host", settings(tmp_path))
    monkeypatch.delitem(sys.modules, "loaders.bucket")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(Mistake, match="need the package obstore; pip install obstore"):
        open_storage("s3://bucket", settings(tmp_path))
