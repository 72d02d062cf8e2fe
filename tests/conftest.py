import os
import shutil
import sys
from collections.abc import Generator, Iterator
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import ProxyHandler, build_opener, install_opener

import pytest

from tests.rows import is_installed

# Two ranks or workers on few cores would otherwise fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# In memory: runs sync their files, and on a busy disk each sync takes a test 0.1 s or more.
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

NEEDED = {"test_labels.py": "pyarrow", "shards": "obstore"}
collect_ignore = [
    name
    for name, package in NEEDED.items()
    if Path(__file__).with_name(name).exists() and not is_installed(package)
]


def pytest_report_header() -> str:
    missing = ", ".join(collect_ignore)
    return f"make setup EXTRAS=all brings what these need: {missing}" if missing else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long and proves what is seldom changed: the folder `faults`, too."""
    for item in items:
        if item.path.parent.name == "faults":
            item.add_marker("slow")
    # Files that take long come first, those with the highest limits above all: no worker has one
    # left when the others have ended.
    limits: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        is_slow = item.get_closest_marker("slow") is not None
        seconds = limit.args[0] if limit else float(is_slow)
        limits[item.path] = max(seconds, limits.get(item.path, 0))
    items.sort(key=lambda item: limits[item.path], reverse=True)


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, except from their own tests: a process that uses CUDA must not fork."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Start the process that forks the runs, before workers of a loader block its signals."""
    if processes := sys.modules.get("tests.processes"):
        # It does not see a GPU: a process that uses one must not fork.
        with mock.patch.dict(os.environ, processes.ENVIRONMENT):
            forkserver.ensure_running()


def skip_fails(report: Any, is_allowed: bool) -> Any:
    """With NO_SKIPS=1, as in `make ci`, what is skipped fails."""
    if report.skipped and os.environ.get("NO_SKIPS") and not is_allowed:
        report.outcome, report.longrepr = "failed", f"NO_SKIPS=1 forbids {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
    """A test may need a GPU, and all of its rows may be of parts that a project does not have."""
    report = yield
    has_no_rows = "got empty parameter set" in str(report.longrepr)
    return skip_fails(report, has_no_rows or item.get_closest_marker("gpu") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, pytest.CollectReport]:
    return skip_fails((yield), is_allowed=False)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """A failed test would leave processes that hang, for which Python waits at its end."""
    yield
    if processes := sys.modules.get("tests.processes"):
        for process in processes.STARTED:
            if process.is_alive():
                process.kill()
        processes.STARTED.clear()


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the `Place` of a kind of data, which is written once."""
    from tests.kinds import Place

    return cache(lambda kind: Place(kind, tmp_path_factory.mktemp("kind")))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """{train,val}/<class>/<image>: 64 and 16 PNGs of 28x28 pixels in two classes."""
    from tests.images import digit_folders

    return digit_folders(tmp_path_factory.mktemp("photos"), range(2), 32, 8)


@pytest.fixture(scope="session")
def options(photos: Path) -> list[str]:
    """A small run with augmentation on: two epochs of eight steps."""
    from tests.images import photos_in

    crops = ["data.crop=[24,24]", "data.random_crop=true", "data.hflip=0.5"]
    small = ["model.kwargs.width=8", "global_batch_size=8", "epochs=2"]
    return photos_in(photos, *crops, *small, "log.every_steps=1", "log.images=0")


@pytest.fixture
def no_downloads() -> Iterator[None]:
    """Lead downloads of this process to a proxy where nothing answers."""
    # `urlopen` reads a proxy of the environment once, and keeps it for all later tests.
    proxies = dict.fromkeys(("http", "https"), "http://127.0.0.1:9")
    install_opener(build_opener(ProxyHandler(proxies)))
    yield
    install_opener(build_opener())
