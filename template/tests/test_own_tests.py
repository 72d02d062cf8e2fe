"""`make test-projects`: the core and a project of the day pass their own tests."""

import sys
from datetime import date
from subprocess import run

import pytest

from template.tests.test_parts import PROJECTS, project_of, template

__all__ = ["project_of", "template"]
OF_THE_DAY = PROJECTS[1 + date.today().toordinal() % (len(PROJECTS) - 1)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", ["core", OF_THE_DAY])
def test_the_tests_of_a_project_pass(names: str, project_of) -> None:
    print(names, flush=True)
    options = '-q -n logical --maxprocesses 8 --dist loadfile -m "not slow"'
    run(f"{sys.executable} -m pytest {options}", shell=True, cwd=project_of(names), check=True)
