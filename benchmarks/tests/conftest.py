from tests.conftest import (
    pytest_configure,
    pytest_make_collect_report,
    pytest_runtest_makereport,
)

__all__ = ["pytest_configure", "pytest_make_collect_report", "pytest_runtest_makereport"]
