from tests.conftest import (
    _no_process_is_left,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
)

__all__ = [
    "_no_process_is_left",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
]
