import os
import shutil
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any
from unittest import mock
from urllib.request import ProxyHandler, build_opener, install_opener

import pytest

# Two ranks or workers on few cores would otherwise fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# In memory: runs sync their files, and on a busy disk each sync takes a test 0.1 s or more.
if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Files and functions, besides the folder `faults`, that take long and prove what is seldom changed.
SLOW = {
    "test_an_elastic_torchrun_exits_as_a_rank_that_met_a_mistake",
    "test_a_run_leaves_no_trace_of_the_credentials_of_its_data",
    "test_export.py",
    "test_predict.py",
    "test_mlflow_needs_no_package_but_those_of_its_extra_and_no_setting",
    "test_new_samples_are_predicted_and_exported_models_take_inputs_as_the_dataset_gives_them",
    "test_ranks_whose_bucket_stays_away_end_and_go_on_from_their_checkpoint_to_the_same_bits",
    "test_ranks_are_started_by_torchrun",
    "test_too_small_shared_memory_names_the_setting_and_does_not_hang",
    "test_under_torchrun_a_mistake_is_told_once_in_each_attempt",
    *("test_entry_points.py", "test_launch.py", "test_side_by_side.py", "test_techniques.py"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = {item.path.name, item.name.partition("[")[0]}
        if names & SLOW or item.path.parent.name == "faults":
            item.add_marker("slow")
    # Files that take long come first: no worker has one left when the others have ended.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, except from their own tests: a process that uses CUDA must not fork."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Start the process that forks the runs, before workers of a loader block its signals."""
    if helpers := sys.modules.get("tests.helpers"):
        # It does not see a GPU: a process that uses one must not fork.
        with mock.patch.dict(os.environ, helpers.ENVIRONMENT):
            forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """A failed test would leave processes that hang, for which Python waits at its end."""
    yield
    if helpers := sys.modules.get("tests.helpers"):
        for process in helpers.STARTED:
            if process.is_alive():
                process.kill()
        helpers.STARTED.clear()


# part: shards
@pytest.fixture
def web() -> Iterator[Any]:
    """A server of files in memory: `tests.servers.WebServer`."""
    from tests.servers import WebServer

    server = WebServer()
    yield server
    server.close()


@pytest.fixture
def no_downloads() -> Iterator[None]:
    """Lead downloads of this process to a proxy where nothing answers."""
    # `urlopen` reads a proxy of the environment once, and keeps it for all later tests.
    proxies = dict.fromkeys(("http", "https"), "http://127.0.0.1:9")
    install_opener(build_opener(ProxyHandler(proxies)))
    yield
    install_opener(build_opener())
