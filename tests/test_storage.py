"""Files of folders, web servers and buckets: whole and right, or an error that says the fix."""

import json
import pickle
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.storage import MissingError, Storage, StorageError, open_storage
from tests.servers import WebServer, bucket_server, web_server

CONTENT = np.random.default_rng(0).bytes(300_000)
KINDS = ("folder", "file", "web", "s3", "gs")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket_server() as url:
        yield url


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


def settings(retry_s: float = 60.0) -> DataConfig:
    return DataConfig(retry_s=retry_s)


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
    }[kind]
    return open_storage(root, settings())


def put(storage: Storage, name: str, content: bytes, folder: Path) -> None:
    (folder / "local").write_bytes(content)
    storage.write(name, folder / "local")


def fetched(storage: Storage, name: str, folder: Path) -> bytes:
    storage.fetch(name, folder / "copy")
    return (folder / "copy").read_bytes()


def test_what_was_written_is_read(storage: Storage, tmp_path: Path) -> None:
    name = "shards/a b.tar"
    assert not storage.exists(name)
    put(storage, name, b"old", tmp_path)
    assert storage.read(name) == fetched(storage, name, tmp_path) == b"old"
    put(storage, name, CONTENT, tmp_path)
    storage.write("empty", b"")
    storage = pickle.loads(pickle.dumps(storage))
    assert storage.exists(name)
    assert storage.read(name) == fetched(storage, name, tmp_path) == CONTENT
    assert storage.read("empty") == fetched(storage, "empty", tmp_path) == b""


def test_what_is_not_there_is_an_error_at_once(storage: Storage, tmp_path: Path) -> None:
    for read in (lambda: storage.read("b"), lambda: storage.fetch("b", tmp_path / "copy")):
        with pytest.raises(MissingError, match="/b.*; set data.root to"):
            read()


@pytest.mark.parametrize("fault", ["reset", "500", "503", "slow", "cut", "408", "429"])
def test_what_may_pass_is_tried_again(fault: str, web: WebServer, tmp_path: Path) -> None:
    web.files["a"] = CONTENT
    web.fault = lambda path, number: fault if number in (0, 2, 3) else None
    assert fetched(open_storage(web.url, settings()), "a", tmp_path) == CONTENT
    assert web.numbers["a"] == 1
    if fault != "slow":
        assert open_storage(web.url, settings()).read("a") == CONTENT
        assert web.numbers["a"] == 4


def test_a_server_that_stays_away_is_named_without_credentials(
    web: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    root = web.url.replace("//", "//who:secret@") + "/folder?signature=secret"
    web.files["folder/a"] = CONTENT
    assert open_storage(root, settings(0.1)).read("a") == CONTENT
    assert web.requests == [("GET", "/folder/a?signature=secret", "Basic d2hvOnNlY3JldA==")]
    messages = {}
    for fault in ("reset", "500", "503", "cut", "401", "403", "404", "408", "429", "400"):
        web.fault = partial(lambda fault, path, number: fault, fault)
        with pytest.raises((StorageError, UserError)) as away:
            open_storage(root, settings(0.1)).read("a")
        messages[fault] = str(away.value)
        assert isinstance(away.value, UserError) == (fault in ("401", "403", "404", "400"))
        assert ("data.retry_s=0.1" in messages[fault]) == isinstance(away.value, StorageError)
        shown = "".join(traceback.format_exception(away.value)) + caplog.text
        assert "secret" not in shown
        assert "who" not in shown
        assert messages[fault].startswith(f"{web.url}/folder/a")
        assert len(messages[fault].splitlines()) == 1
    assert "500 Internal Server Error" in messages["500"]
    assert "USER:PASSWORD" in messages["403"]
    web.close()
    with pytest.raises(StorageError, match="Connection refused"):
        open_storage(root, settings(0.1)).read("a")


def test_a_bucket_of_another_region_is_told_at_once(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    web.fault = lambda path, number: "301"
    with pytest.raises(UserError, match="region.*; set AWS_REGION to the region"):
        open_storage("s3://bucket/x", settings()).exists("a")
    assert len(web.requests) == 1


def test_two_containers_write_one_file_into_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two containers may have the same id."""
    (tmp_path / "local").write_bytes(CONTENT)
    storage, copyfile = open_storage(str(tmp_path / "shared"), settings()), shutil.copyfile

    def copy_and_meet_another(source: Path, target: Path) -> None:
        copyfile(source, target)
        monkeypatch.setattr(shutil, "copyfile", copyfile)
        storage.write("a", source)

    monkeypatch.setattr(shutil, "copyfile", copy_and_meet_another)
    storage.write("a", tmp_path / "local")
    assert storage.read("a") == CONTENT
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["a"]


def test_a_server_that_comes_back_in_time_is_no_error(web: WebServer) -> None:
    web.files["a"] = CONTENT
    storage = open_storage(web.url, settings())
    assert storage.exists("a")
    web.close()
    threading.Timer(0.5, web.reopen).start()
    assert storage.read("a") == CONTENT


def test_many_threads_read_at_once() -> None:
    with web_server() as web, ThreadPoolExecutor(16) as pool:
        web.files["a"] = CONTENT
        eight_have_come = threading.Barrier(8)
        web.fault = lambda path, number: None if eight_have_come.wait(240) >= 0 else "500"
        storage = open_storage(web.url, settings())
        assert set(pool.map(storage.read, 16 * ["a"])) == {CONTENT}


def test_a_root_that_cannot_be_read_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="ftp://host: ftp:// .*; use a folder or one"):
        open_storage("ftp://user:secret@host", settings())
    monkeypatch.delitem(sys.modules, "loaders.storage.bucket")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UserError, match="need the package obstore; pip install obstore"):
        open_storage("s3://bucket", settings())
