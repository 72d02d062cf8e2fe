"""With NO_SKIPS=1, no test is skipped that needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers import REPOSITORY

FILES = {
    "test_one.py": """
import pytest

@pytest.mark.skipif(True, reason="it is marked")
def test_marked(): ...

def test_called():
    pytest.skip("it says so")

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="there is no GPU")
def test_gpu(): ...

@pytest.mark.parametrize("row", [])
def test_without_rows(row): ...
""",
    "test_whole.py": """
import pytest

pytest.importorskip("no_such_package")
""",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, (0, "0", "0", "5")), ({"NO_SKIPS": "1"}, (1, "1", "2", "2"))],
)
def test_a_skipped_test_or_file_fails_where_nothing_may_be_skipped(
    environment: dict[str, str], expected: tuple[int, str, str, str], tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", f"--config-file={REPOSITORY}/pyproject.toml"]
    command += ["-p", "tests.conftest", "--continue-on-collection-errors", str(tmp_path)]
    env = {key: value for key, value in os.environ.items() if key != "NO_SKIPS"} | environment
    done = subprocess.run([*command, f"--junitxml={tmp_path}/a.xml"], cwd=REPOSITORY, env=env)
    [suite] = ElementTree.parse(tmp_path / "a.xml").getroot()
    counts = (suite.attrib[name] for name in ("failures", "errors", "skipped"))
    assert (done.returncode, *counts) == expected
