"""Files of folders, web servers and buckets: whole and right, or an error that says the fix."""

import json
import pickle
import traceback
from pathlib import Path

import numpy as np
import pytest

from conf.errors import UserError
from loaders.shards import Storage, StorageError
from tests.shards.conftest import WebServer

CONTENT = np.random.default_rng(0).bytes(300_000)
PATIENT, IMPATIENT = 60.0, 0.1  # seconds


@pytest.mark.parametrize(
    "root", ["{tmp_path}/a folder", "{web.url}/prefix/", "s3://bucket/prefix", "gs://bucket/prefix"]
)
def test_what_was_written_is_read(root: str, tmp_path: Path, web, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    account = {"gcs_base_url": web.url, "disable_oauth": True}
    account |= dict.fromkeys(("private_key", "private_key_id", "client_email"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    storage = Storage(root.format(tmp_path=tmp_path, web=web), PATIENT)
    name, local, fetched = "shards/a b.tar", tmp_path / "local", tmp_path / "copy"
    assert not storage.exists(name)
    for content in (b"old", CONTENT, b""):
        local.write_bytes(content)
        storage.write(name, local)
        storage.write("bytes", content)
        copy = pickle.loads(pickle.dumps(storage))
        assert copy.exists(name)
        assert copy.read(name) == copy.read("bytes") == content
        copy.fetch(name, fetched)
        assert fetched.read_bytes() == content
    with pytest.raises(UserError, match="/b is missing.*data.root"):
        storage.read("b")


@pytest.mark.parametrize("fault", ["reset", "500", "slow", "cut", "429"])
def test_what_may_pass_is_tried_again(fault: str, web: WebServer, tmp_path: Path) -> None:
    web.fault = lambda path: fault if len(web.requests) in (1, 3, 4) else None
    web.files["a"] = CONTENT
    storage = Storage(web.url, PATIENT, stall_s=0.2 if fault == "slow" else PATIENT)
    storage.fetch("a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == CONTENT
    assert storage.read("a") == CONTENT
    assert len(web.requests) == 5 or fault == "slow"  # on a busy machine, others are slow as well


def test_a_server_that_fails_is_named_without_credentials(web: WebServer, monkeypatch) -> None:
    root = f"{web.url}/folder"
    monkeypatch.setenv("HTTP_AUTHORIZATION", "Basic d2hvOnNlY3JldA==")
    web.files["folder/a"] = CONTENT
    assert Storage(root, IMPATIENT).read("a") == CONTENT
    assert web.requests == [("GET", "/folder/a", "Basic d2hvOnNlY3JldA==")]
    denied = {"400": "data.root", "403": "HTTP_AUTHORIZATION", "404": "data.root"}
    passing = dict.fromkeys(("reset", "503", "cut", "429"), "data.retry_s=0.1")
    for fault, named in {**denied, **passing}.items():
        web.fault = {"folder/a": fault}.get
        with pytest.raises(UserError if fault in denied else StorageError, match=named) as away:
            Storage(root, IMPATIENT).read("a")
        assert str(away.value).startswith(f"{web.url}/folder/a")
        assert len(str(away.value).splitlines()) == 1
        shown = "".join(traceback.format_exception(away.value))
        assert not any(word in shown for word in ("d2hv", "Basic d"))
    web.close()
    with pytest.raises(StorageError, match="data.retry_s"):
        Storage(root, IMPATIENT).read("a")


def test_an_address_that_cannot_be_read_is_refused_at_once(web: WebServer, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    web.fault = lambda path: "301"  # the bucket is in another region
    with pytest.raises(UserError, match="AWS_REGION"):
        Storage("s3://bucket/x", PATIENT).exists("a")
    assert len(web.requests) == 1
    with pytest.raises(UserError, match="^ftp://"):
        Storage("ftp://host", PATIENT)
    for scheme in ("http", "https", "s3", "gs"):
        for place in ("who:s3cret@host/folder", "who:s3/cret@host", "host/folder?signature=s3cret"):
            with pytest.raises(UserError, match="leave them out, and set [A-Z_]+ ?") as error:
                Storage(f"{scheme}://{place}", PATIENT)
            assert not any(word in str(error.value) for word in ("s3cret", "who", "cret@"))
