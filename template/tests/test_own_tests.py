"""Projects start, import what they have, and pass their own tests."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from template.project import PARTS, files_of, git, with_needs
from template.tests.test_project import clone_template, made
from tests.helpers import REPOSITORY
from tests.processes import execute
from tests.test_architecture import MODULES, imports_of


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return clone_template(tmp_path_factory.mktemp("projects") / "template")


def paths_of(module: str) -> list[str]:
    """Where the file of a module may be."""
    path = module.replace(".", "/")
    return [f"{path}.py", f"{path}/__init__.py"]


@pytest.mark.parametrize("part", ["core", *PARTS])
def test_a_part_alone_imports_nothing_that_its_project_lacks(part: str) -> None:
    files = {*files_of(with_needs([part]), git(REPOSITORY, "ls-files").splitlines())}
    has = {module for module in MODULES if {*paths_of(module)} & files}
    for module in has:
        assert not (imports_of(module) & MODULES.keys()) - has, module


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone_trains(part: str, template: Path) -> None:
    project = template.with_name(part)
    made(template, project, part)
    scripts = sorted(path.name for path in project.glob("train*.py"))
    assert scripts[0] == "train.py"
    steps = ["max_steps=2", "log.images=0"]
    for script in scripts:
        execute([script, *steps], template.with_name("prints"), folder=project)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # each of their tests has a limit
@pytest.mark.parametrize(("parts", "script"), [("", ""), ("ddp amp dali", "merged")])
def test_a_project_starts_and_passes_make_test(parts: str, script: str, template: Path) -> None:
    """In one process, since other tests run beside it; not in /dev/shm, which one test replaces."""
    with TemporaryDirectory(dir="/var/tmp") as folder:
        project = Path(folder, "mine")
        made(template, project, parts, script)
        python = Path(sys.executable)
        subprocess.run([python, "train.py", "max_steps=2", "log.images=0"], cwd=project, check=True)
        make = ["make", "-o", ".venv/ready", f"BIN={python.parent}", "test"]
        env = {**os.environ, "PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}
        subprocess.run(make, cwd=project, env=env, check=True)
