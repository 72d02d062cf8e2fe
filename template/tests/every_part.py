"""Projects of some parts, tested as their owners do.

`make test-projects`: their own tests. `make test-parts`, up to half an hour on two cores: each part
alone is left out.
"""

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from template.parts import PARTS, with_needs
from template.tests.test_parts import PROJECTS, project_of, template
from template.tests.test_project import made
from tests.helpers import run_all

__all__ = ["project_of", "template"]
OF_THE_DAY = PROJECTS[1 + date.today().toordinal() % (len(PROJECTS) - 1)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", ["core", OF_THE_DAY])
def test_the_tests_of_a_project_pass(names: str, project_of) -> None:
    print(names, flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "logical", "--maxprocesses", "8"]
    command += ["--dist", "loadfile", "-m", "not slow"]
    subprocess.run(command, cwd=project_of(names), check=True)


@pytest.mark.parametrize("part", PARTS)
def test_a_project_without_a_part_trains(part: str, template: Path, tmp_path: Path) -> None:
    names = " ".join(name for name in PARTS if part not in with_needs([name]))
    project = tmp_path / "project"
    made(template, project, names)
    steps = ["max_steps=2", "log.images=0"]
    for script in sorted(path.name for path in project.glob("train*.py")):
        output = f"output_dir={tmp_path / script}"
        num_ranks = 2 if "torchrun" in (project / script).read_text() else 1
        run_all([[script, *steps, output]], tmp_path, num_ranks, project)
