"""Each part can be left out of a project: nothing that is left needs it or speaks of it."""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from template.parts import listing, owner_of, read_parts, with_needs
from template.project import LEFT_OUT, git
from template.tests.test_project import clone_template, made
from tests.helpers import REPOSITORY, run_all
from tests.images import make_photos

PARTS, TOGETHER = read_parts()
GUIDE = (REPOSITORY / "GUIDE.md").read_text()
SETS = ["core", *re.findall(r'\| `PARTS="([^"]+)"', GUIDE)]
"""Parts of the projects that the guide recommends."""
OF_THIS_COMMIT = random.Random(git(REPOSITORY, "rev-parse", "HEAD")).choice(sorted(PARTS))
WITHOUT_IT = " ".join(x for x in PARTS if OF_THIS_COMMIT not in with_needs([x])) or "core"
DALI = "ddp amp dali slurm"
MERGED = ["ddp amp runs sweep predict slurm", DALI]
"""Those with SCRIPT=merged."""


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return clone_template(tmp_path_factory.mktemp("parts") / "template")


@pytest.fixture(scope="module")
def project_of(template: Path) -> Callable[[str], Path]:
    """Returns the project of these parts, each made when first asked for."""
    projects: dict[str, Path] = {}

    def project(names: str) -> Path:
        if names not in projects:
            projects[names] = template.with_name(f"project-{len(projects)}")
            made(template, projects[names], names, "merged" if names in MERGED else "")
        return projects[names]

    return project


def mentions(root: Path, gone: list[str]) -> list[str]:
    """Places in documents that name files or configuration choices that a project does not have."""
    words = [re.sub(r"^conf/(\w+)/(\w+)\.yaml$", r"\1=\2", path) for path in gone]
    wanted = "|".join(re.escape(word) for word in words if not word.endswith(".yaml"))
    pattern = re.compile(rf"(?<![\w/])(?:{wanted})(?!\w)")
    found = []
    for path in sorted(root.rglob("*.md")):
        text, name = path.read_text(), path.relative_to(root)
        found += [f"{name} names {match[0]}" for match in pattern.finditer(text)]
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
            if not (path.parent / link).exists():
                found.append(f"{name} links to {link}")
    return found


# mypy takes most of its time for packages, to which a cut of a project makes no difference.
OWN_TYPES = """
[[tool.mypy.overrides]]
module = ["numpy.*", "pytest.*", "_pytest.*"]
follow_imports = "normal"
"""


def problems(project: Path, template: Path, with_packages: bool = False) -> list[str]:
    """What ruff, mypy and readers of a project would find wrong; `with_packages`, mypy reads the
    types of packages, too."""
    files = {folder: set(git(folder, "ls-files").splitlines()) for folder in (template, project)}
    found = mentions(project, sorted(files[template] - files[project]))
    cache, config = (template.with_name(name) for name in ("mypy", "mypy.toml"))
    text = (project / "pyproject.toml").read_text()
    if not with_packages:
        text = text.replace("warn_unused_ignores = true", 'follow_imports = "skip"') + OWN_TYPES
    config.write_text(text)
    commands = ["ruff check --quiet --output-format=concise", "ruff format --check --quiet"]
    # Most files are equal in all projects.
    commands += [f"mypy --no-error-summary --cache-dir={cache} --config-file={config}"]
    for command in commands:
        arguments = [sys.executable, "-m", *command.split()]
        done = subprocess.run(arguments, cwd=project, capture_output=True, text=True)
        found += (done.stdout + done.stderr).splitlines()
    return found


def test_every_path_of_a_part_is_there_and_in_one_part_only() -> None:
    paths = [path for part in PARTS.values() for path in part.paths] + list(TOGETHER) + LEFT_OUT
    for path in paths:
        assert (REPOSITORY / path).exists(), path
        owners = {owner_of(other) for other in paths if f"{path}/".startswith(f"{other}/")}
        # A part may lie in the folder of one that it needs.
        assert len(owners) <= 1 or any(owners <= with_needs([name]) for name in owners), path
    for name, part in PARTS.items():
        assert set(part.needs) <= PARTS.keys(), name
    for path, names in TOGETHER.items():
        assert set("|".join(names).split("|")) <= PARTS.keys() | {"scripts"}, path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", ["core", WITHOUT_IT, MERGED[0]])
def test_a_project_of_some_parts_is_whole(names: str, template: Path, project_of) -> None:
    found = problems(project_of(names), template)
    assert not found, "\n".join([f"{names}:", *found])


def num_lines(project: Path) -> tuple[int, int]:
    """Lines of Python and YAML of the product and of the tests."""
    files = git(project, "ls-files", "*.py", "*.yaml").splitlines()
    lines = {file: len((project / file).read_text().splitlines()) for file in files}
    of_tests = sum(lines[file] for file in files if file.startswith("tests/"))
    return sum(lines.values()) - of_tests, of_tests


def test_the_list_of_parts_has_the_lines_that_projects_have(project_of) -> None:
    files = git(REPOSITORY, "ls-files").splitlines()
    text = listing(REPOSITORY, [file for file in files if not file.startswith(tuple(LEFT_OUT))])
    product, of_tests = num_lines(project_of("core"))
    assert f"core       {product:6,}" in text
    assert product <= 8_200
    assert of_tests <= 3_000
    own = re.search(r"([\d,]+)  what PARTS=own has", text)
    assert own
    assert int(own[1].replace(",", "")) <= 6_000
    rows = re.findall(r"^  (\w+) +([\d,]+) +([\d,]+)  \w", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(PARTS)
    assert [name for name, *counts in rows if "0" in counts] == ["gpu"]  # tests alone


def test_a_project_with_one_merged_script_names_no_other(project_of) -> None:
    project = project_of(MERGED[0])
    assert [path.name for path in project.glob("train*.py")] == ["train.py"]
    script = (project / "train.py").read_text()
    command = "torchrun --standalone --nproc_per_node=2 train.py"
    assert re.findall(r"Start with `(.*?)`", script) == [command]
    assert "# new #" not in script
    assert "compose.py" not in script
    assert "DistributedDataParallel(" in script
    assert "scaler.scale(loss).backward()" in script
    for name in ("README.md", "Makefile", "docs/use.md"):
        text = (project / name).read_text()
        assert "python train.py" not in text, name
        started = command.replace("=2", "=1") if name == "Makefile" else command
        assert name == "docs/use.md" or started in text
    assert "script=${SCRIPT:-train.py}" in (project / "launch" / "slurm.sbatch").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("names", ["core", *MERGED])
def test_a_project_of_some_parts_trains(names: str, project_of) -> None:
    """`make test-projects` trains the others."""
    project = project_of(names)
    command = ["train.py", "max_steps=2", "output_dir=outputs/run", "log.images=0"]
    if names == DALI:
        assert num_lines(project)[0] <= 9_200
        make_photos(project / "photos", 30)
        command += ["loader=dali", "data=imagefolder", "data.root=photos", "data.crop=28"]
        command += ["data.resize=32", "global_batch_size=4"]
    run_all([command], project.parent, 2 if names in MERGED else 1, project)
    assert (project / "outputs" / "run" / "checkpoints" / "last.pt").exists()
