"""The two usual projects pass all of their own tests."""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from template.tests.test_parts import MERGED, project_of, template

__all__ = ["project_of", "template"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]  # each of their tests has a limit


@pytest.mark.parametrize("names", ["core", MERGED])
def test_a_project_passes_its_own_tests(names: str, project_of) -> None:
    """In one process, since other tests run beside it; not in /dev/shm, which one test replaces."""
    command = [sys.executable, "-m", "pytest", "-q"]
    with TemporaryDirectory(dir="/var/tmp") as folder:
        project = shutil.copytree(project_of(names), Path(folder, "project"), symlinks=True)
        subprocess.run(command, cwd=project, check=True)
