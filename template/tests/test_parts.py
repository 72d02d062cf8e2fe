"""A project is a subset of the template's files, and speaks of nothing that it lacks."""

import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from template.parts import PARTS, TABLE, listing, with_needs
from template.project import git
from template.tests.test_project import clone_template, made
from tests.helpers import REPOSITORY

MADE = {"README.md", "pyproject.toml", "requirements.txt"}
MERGED = "ddp amp dali"
"""The project with SCRIPT=merged."""
PROJECTS = ["core", "own", MERGED, "dense predict", "compose ema shards runs table"]


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    return clone_template(tmp_path_factory.mktemp("parts") / "template")


@pytest.fixture(scope="session")
def project_of(template: Path) -> Callable[[str], Path]:
    """Returns the project of these parts, which is made when first asked for."""

    def project(names: str) -> Path:
        folder = template.with_name(names.replace(" ", "-"))
        if not folder.exists():
            made(template, folder, names, "merged" if names == MERGED else "")
        return folder

    return project


def unknown_in(project: Path, gone: set[str]) -> list[str]:
    """Places in documents that name files or configuration choices that a project does not have."""
    words = [re.sub(r"^conf/(\w+)/(\w+)\.yaml$", r"\1=\2", path) for path in gone]
    wanted = "|".join(re.escape(word) for word in words if not word.endswith(".yaml"))
    found = []
    for path in project.rglob("*.md"):
        text = path.read_text()
        found += [f"{path}: {name}" for name in re.findall(rf"(?<![\w/])({wanted})(?!\w)", text)]
        links = re.findall(r"\]\(([^)#:]+)[^):]*\)", text)
        found += [f"{path}: {link}" for link in links if not (path.parent / link).exists()]
    return found


def test_the_table_names_what_there_is() -> None:
    assert len(PARTS) <= 16
    assert TABLE["files"].keys() == {*PARTS, "template"}
    for path in (*chain(*TABLE["files"].values()), *TABLE["with"]):
        assert (REPOSITORY / path).exists(), path
    for names in (*TABLE["needs"].values(), *TABLE["with"].values()):
        assert PARTS.keys() >= set(names)
    assert with_needs(["dense", "runs"]) == {"dense", "runs", "ddp"}


@pytest.mark.parametrize("names", PROJECTS)
def test_a_project_is_a_subset_that_names_nothing_it_lacks(names, template, project_of) -> None:
    project = project_of(names)
    files, all_files = (set(git(place, "ls-files").splitlines()) for place in (project, template))
    assert files <= all_files
    for name in files - MADE - ({"train.py"} if names == MERGED else set()):
        assert (project / name).read_bytes() == (template / name).read_bytes(), name
    gone = all_files - files
    if names == MERGED:
        gone -= {f"train_{name}.py" for name in names.split()}  # which pages may explain
    assert unknown_in(project, gone) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", PROJECTS)
def test_a_project_is_clean_for_ruff_and_mypy(names: str, template: Path, project_of) -> None:
    cache = template.with_name("mypy")  # most files are equal in all projects
    for command in ("ruff check", "ruff format --check", f"mypy --cache-dir={cache}"):
        arguments = [sys.executable, "-m", *command.split()]
        done = subprocess.run(arguments, cwd=project_of(names), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_part_is_listed_with_the_lines_that_it_adds() -> None:
    tracked = git(REPOSITORY, "ls-files").splitlines()
    sizes = dict(re.findall(r"^(\w+) +\+?([\d,]+)  \w", listing(tracked), re.MULTILINE))
    assert list(sizes) == ["core", *PARTS]
    code = [REPOSITORY / name for name in ("train_ema.py", "runtime/ema.py")]
    assert int(sizes["ema"]) == sum(len(path.read_text().splitlines()) for path in code)


def test_a_project_with_one_merged_script_has_no_other(project_of) -> None:
    project = project_of(MERGED)
    assert [path.name for path in project.glob("train*.py")] == ["train.py"]
    script, readme = ((project / name).read_text() for name in ("train.py", "README.md"))
    command = "torchrun --standalone --nproc_per_node=2 train.py"
    assert re.findall(r"Start with `(.*?)`", script) == [command]
    assert "# new #" not in script
    assert "DistributedDataParallel(" in script
    assert "scaler.scale(loss).backward()" in script
    assert command in readme
    make = ["make", "--no-print-directory", "-n", "train"]
    making = subprocess.run(make, cwd=project, capture_output=True, text=True)
    assert making.stdout.splitlines()[-1].endswith(command)
    assert readme.count("python train.py") == 1  # where it says what to write instead
