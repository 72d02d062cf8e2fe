"""The two usual projects pass all of their own tests."""

import subprocess
import sys

import pytest

from template.tests.test_parts import MERGED, project_of, template

__all__ = ["project_of", "template"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # each of their tests has a limit


@pytest.mark.parametrize("names", ["core", MERGED])
def test_a_project_passes_its_own_tests(names: str, project_of) -> None:
    """In one process, since other tests run beside it."""
    command = [sys.executable, "-m", "pytest", "-q"]
    subprocess.run(command, cwd=project_of(names), check=True)
