from tests.conftest import (
    _no_process_is_left,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_make_collect_report,
    pytest_runtest_makereport,
)

__all__ = [
    "_no_process_is_left",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
]
