"""The cache of buckets on a machine's disk: shared, bounded, never half a file."""

import errno
import logging
import os
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.schema import DataConfig
from loaders import bucket
from loaders.storage import StorageError, open_storage
from tests.helpers import FORKSERVER
from tests.servers import WebServer, web_server

SIZE = 200_000
FILES = {f"{n}.tar": np.random.default_rng(n).bytes(SIZE) for n in range(10)}


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(bucket, "PART", 50_000)
    monkeypatch.setattr(bucket, "FIRST_PAUSE_S", 0.02)
    with web_server() as server:
        server.files.update(FILES)
        yield server


def settings(folder: Path, num_files: float) -> DataConfig:
    return DataConfig(cache_dir=str(folder), cache_gb=num_files * SIZE / 1e9, retry_s=60.0)


def copies(folder: Path) -> int:
    """How many files of the size of a copy there are, whole or not."""
    return sum(path.stat().st_size == SIZE for path in (folder / "shards").iterdir())


def _read(url: str, data: DataConfig, names: list[str]) -> None:
    storage = open_storage(url, data)
    for name in names:
        assert storage.read(name, 1000, 3000) == FILES[name][1000:3000]
    for name in names:
        assert storage.read_whole(name) == FILES[name]


def start(*arguments: Any) -> ForkServerProcess:
    process = FORKSERVER.Process(target=_read, args=arguments)
    process.start()
    return process


def test_processes_share_one_copy_that_is_fetched_once(web: WebServer, tmp_path: Path) -> None:
    web.latency_s = 0.02
    processes = [start(web.url, settings(tmp_path, 20), list(FILES)) for _ in range(4)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    fetched = [path.strip("/") for method, path, _ in web.requests if method == "GET"]
    assert sorted(fetched) == sorted(FILES)
    assert copies(tmp_path) == len(FILES)


def test_the_least_recently_used_copy_goes_first(web: WebServer, tmp_path: Path) -> None:
    storage = open_storage(web.url, settings(tmp_path, 3.5))
    for name in ("0.tar", "1.tar", "2.tar", "0.tar", "3.tar"):
        assert storage.read_whole(name) == FILES[name]
        assert copies(tmp_path) <= 3
    if Path("/proc/self/fd").exists():  # what is removed but open takes up the disk
        files = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
        assert not [f for f in files if f.startswith(str(tmp_path)) and "(deleted)" in f]
    web.requests.clear()
    for name in ("3.tar", "2.tar", "0.tar"):
        assert storage.read(name, 5, 9) == FILES[name][5:9]
    assert not web.requests
    assert storage.read("1.tar", 5, 9) == FILES["1.tar"][5:9]
    assert web.requests


def test_a_run_with_less_room_leaves_alone_what_one_with_more_uses(
    web: WebServer, tmp_path: Path
) -> None:
    large, small = (open_storage(web.url, settings(tmp_path, number)) for number in (6, 2))
    for name in list(FILES)[:6]:
        large.read(name, 0, 1)
    small.read("6.tar", 0, 1)
    assert copies(tmp_path) == 6
    large._bound = None  # type: ignore[attr-defined]  # as if it had ended
    small.read("7.tar", 0, 1)
    assert copies(tmp_path) == 2


def test_what_a_killed_process_leaves_is_not_taken_for_whole_and_goes(
    web: WebServer, tmp_path: Path
) -> None:
    web.fault = lambda path, number: "slow" if number else None
    process = start(web.url, settings(tmp_path, 2), ["0.tar"])
    deadline = time.monotonic() + 30
    while not (tmp_path / "shards").exists() or not copies(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    assert [path.suffix for path in (tmp_path / "shards").glob("?" * 32 + "*")] == [".partial"]
    web.fault = lambda path, number: None
    _read(web.url, settings(tmp_path, 2), ["1.tar", "2.tar", "0.tar"])
    assert copies(tmp_path) == 2
    assert not list(tmp_path.glob("*/*.partial"))


def test_a_failed_fetch_leaves_nothing_and_is_tried_again(web: WebServer, tmp_path: Path) -> None:
    storage = open_storage(web.url, settings(tmp_path, 2))
    web.fault = lambda path, number: "403" if number == 3 else None
    begun = [storage.begin("0.tar", start, start + 10) for start in range(5)]
    for each in begun:
        with pytest.raises(StorageError, match="403 Forbidden"):
            each.result()
    assert copies(tmp_path) == 0
    assert storage.read_whole("0.tar") == FILES["0.tar"]


def test_a_file_without_room_is_read_without_a_copy(
    web: WebServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(web.url, settings(tmp_path, 0.9))
    for name in FILES:
        assert storage.read(name, 7, 77) == FILES[name][7:77]
        assert storage.read_whole(name) == FILES[name]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "0.tar alone has 0.0002 GB" in caplog.text


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_told_once_and_reading_goes_on(
    call: str,
    web: WebServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = open_storage(web.url, settings(tmp_path, 20))
    storage.read("0.tar", 0, 1)

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    for name in FILES:
        assert storage.read(name, 7, 77) == FILES[name][7:77]
        assert storage.read_whole(name) == FILES[name]
    assert caplog.text.count("No space left on device; read without a copy") == 1
    assert len(caplog.records) == 1
    assert copies(tmp_path) == 1
    web.requests.clear()
    storage.read("0.tar", 0, 1)
    assert not web.requests


def test_another_file_of_the_same_name_is_another_copy(web: WebServer, tmp_path: Path) -> None:
    open_storage(web.url, settings(tmp_path, 3)).read("0.tar", 0, 1)
    web.files["0.tar"] = FILES["1.tar"]
    assert open_storage(web.url, settings(tmp_path, 3)).read("0.tar", 0, 9) == FILES["1.tar"][:9]
