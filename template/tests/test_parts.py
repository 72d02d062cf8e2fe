"""A project is a subset of the template's files, and speaks of nothing that it lacks."""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from template.parts import LEFT_OUT, PARTS, TOGETHER, files_of, listing, with_needs
from template.project import git
from template.tests.test_project import clone_template, made
from tests.helpers import REPOSITORY

MADE = {"README.md", "pyproject.toml", "requirements.txt"}
DALI = "ddp amp dali"
MERGED = {DALI}
"""Those with SCRIPT=merged."""
OF_THE_DAY = random.Random(date.today().toordinal()).sample(sorted(PARTS), 5)
PROJECTS = ["core", "own", DALI, "segmentation predict", " ".join(OF_THE_DAY)]


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    return clone_template(tmp_path_factory.mktemp("parts") / "template")


@pytest.fixture(scope="session")
def project_of(template: Path) -> Callable[[str], Path]:
    """Returns the project of these parts, each made when first asked for."""
    projects: dict[str, Path] = {}

    def project(names: str) -> Path:
        if names not in projects:
            projects[names] = template.with_name(f"project-{len(projects)}")
            made(template, projects[names], names, "merged" if names in MERGED else "")
        return projects[names]

    return project


def unknown_in(project: Path, gone: list[str]) -> list[str]:
    """Places in documents that name files or configuration choices that a project does not have."""
    words = [re.sub(r"^conf/(\w+)/(\w+)\.yaml$", r"\1=\2", path) for path in gone]
    wanted = "|".join(re.escape(word) for word in words if not word.endswith(".yaml"))
    pattern = re.compile(rf"(?<![\w/])(?:{wanted or '(?!)'})(?!\w)")
    found = []
    for path in sorted(project.rglob("*.md")):
        text, name = path.read_text(), path.relative_to(project)
        found += [f"{name} names {match[0]}" for match in pattern.finditer(text)]
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
            if not (path.parent / link).exists():
                found.append(f"{name} links to {link}")
    return found


def test_no_file_has_marks_of_parts() -> None:
    mark = r"(#|<!--) (part|without) ?[a-z|_ ]*:"
    found = subprocess.run(["git", "grep", "-nE", mark], cwd=REPOSITORY, capture_output=True)
    assert found.stdout == b""


def test_every_path_of_a_part_is_there() -> None:
    assert len(PARTS) <= 25
    files = [path for part in PARTS.values() for path in part["files"]]
    for path in [*files, *TOGETHER, *LEFT_OUT]:
        assert (REPOSITORY / path).exists(), path
    for names in TOGETHER.values():
        assert set("|".join(names).split("|")) <= PARTS.keys() | {"scripts"}


@pytest.mark.parametrize("names", PROJECTS)
def test_a_project_is_a_subset_that_names_nothing_it_lacks(names, template, project_of) -> None:
    project = project_of(names)
    files = set(git(project, "ls-files").splitlines())
    all_files = set(git(template, "ls-files").splitlines())
    made_here = MADE | ({"train.py"} if names in MERGED else set())
    assert files <= all_files
    for name in files - made_here:
        assert (project / name).read_bytes() == (template / name).read_bytes(), name
    merged = {f"train_{name}.py" for name in names.split()} if names in MERGED else set()
    found = unknown_in(project, sorted(all_files - files - merged))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", PROJECTS)
def test_a_project_is_clean_for_ruff_and_mypy(names: str, template: Path, project_of) -> None:
    cache = template.with_name("mypy")  # most files are equal in all projects
    for command in ("ruff check", "ruff format --check", f"mypy --cache-dir={cache}"):
        arguments = [sys.executable, "-m", *command.split()]
        done = subprocess.run(arguments, cwd=project_of(names), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_list_of_parts_has_the_lines_that_projects_have(project_of) -> None:
    text = listing(git(REPOSITORY, "ls-files").splitlines())
    project = project_of("core")
    files = git(project, "ls-files", "*.py", "*.yaml", ":!tests").splitlines()
    num_lines = sum(len((project / file).read_text().splitlines()) for file in files)
    assert f"core         {num_lines:6,}" in text
    rows = re.findall(r"^(\w+) +([\d,]+) +([\d,]+)  \w", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(PARTS)


def test_a_project_with_one_merged_script_has_no_other(project_of) -> None:
    project = project_of(DALI)
    assert [path.name for path in project.glob("train*.py")] == ["train.py"]
    script = (project / "train.py").read_text()
    command = "torchrun --standalone --nproc_per_node=2 train.py"
    assert re.findall(r"Start with `(.*?)`", script) == [command]
    assert "# new #" not in script
    assert "DistributedDataParallel(" in script
    assert "scaler.scale(loss).backward()" in script
    readme = (project / "README.md").read_text()
    assert command in readme
    assert readme.count("python train.py") == 1  # where it says what to write instead


def test_a_part_of_a_part_comes_with_what_it_needs() -> None:
    everything = git(REPOSITORY, "ls-files").splitlines()
    assert with_needs(["compare"]) == {"compare", "ddp"}
    assert with_needs(["unet", "core"]) == {"segmentation"}  # a name of an earlier version
    assert "models/unet.py" in files_of({"segmentation"}, everything)
    assert "models/unet.py" not in files_of({"restoration"}, everything)
    assert "loaders/layouts/pairs.py" in files_of({"restoration"}, everything)
    assert "train_ddp_amp.py" not in files_of({"ddp"}, everything)
