"""`make project` makes a project of its own, and brings it newer versions of the template."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from template.project import LEFT_OUT
from tests.helpers import REPOSITORY

IDENTITY = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
# Nobody has told git who they are, or what to ignore.
NOBODY = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *IDENTITY, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def clone_template(folder: Path) -> Path:
    """A repository with the working tree of this one as its only commit."""
    names = git(REPOSITORY, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in names:
        if (REPOSITORY / name).is_file() and not (REPOSITORY / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    git(folder, "init", "--quiet")
    commit(folder, "template")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", message)


def make_project(
    template: Path, directory: str | Path, parts: str = "", script: str = ""
) -> subprocess.CompletedProcess[str]:
    """What `make project` runs; from the template's folder."""
    command = [sys.executable, "-m", "template.project", str(directory), parts, script]
    return subprocess.run(command, cwd=template, env=NOBODY, capture_output=True, text=True)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return clone_template(tmp_path / "template")


def test_a_project_has_its_own_name_history_and_no_part_of_the_template_alone(template) -> None:
    made = make_project(template, "../my first Project")
    assert made.returncode == 0, made.stderr
    project = template.parent / "my first Project"
    assert (project / "README.md").read_text().startswith("# my first Project\n")
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == (
        "my-first-project"
    )
    assert git(project, "status", "--porcelain") == ""
    assert git(project, "branch", "--format=%(refname:short)").split() == ["main", "template"]
    assert git(project, "rev-list", "--count", "--all").strip() == "1"
    assert os.access(project / ".ci" / "run", os.X_OK)
    for name in LEFT_OUT:
        assert (REPOSITORY / name).exists()
        assert not (project / name).exists()

    # Nothing that is left speaks of what is not there, or needs it.
    gone = re.compile(r"matplotlib|distributed-training-template|benchmarks|experiment=")
    files = [project / name for name in git(project, "ls-files").splitlines()]
    for path in files:
        if path.suffix in (".md", ".toml", ".txt"):
            assert not gone.search(path.read_text()), path
        if path.suffix == ".py":
            for module in imported(path):
                there = project.joinpath(*module.split("."))
                assert there.is_dir() or there.with_suffix(".py").is_file(), f"{path}: {module}"


def imported(path: Path) -> set[str]:
    """The modules of the template that a file imports."""
    own = {"benchmarks", "compose", "conf", "loaders", "models", "runtime", "tasks", "template"}
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    modules |= {name.name for n in nodes if isinstance(n, ast.Import) for name in n.names}
    return {module for module in modules if module.partition(".")[0] in own}


def test_a_newer_template_is_merged_with_the_users_own_edits(template: Path) -> None:
    project = template.parent / "mine"
    assert make_project(template, project).returncode == 0

    # The user edits what they have, deletes a script and is in the middle of something else.
    replace(project / "train.py", "loss.backward()", "(2 * loss).backward()")
    (project / "train_dp.py").unlink()
    commit(project, "my loss")
    replace(project / "README.md", "Made from", "Mine, made from")
    before = git(project, "status", "--porcelain"), git(project, "rev-parse", "main")

    # The template goes on.
    replace(template / "train.py", "    seed_everything(cfg.seed)\n", "    seed_everything(1)\n")
    (template / "models" / "newer.py").write_text("")
    (template / "benchmarks" / "newer.py").write_text("")
    (template / "launch" / "slurm.sbatch").unlink()
    commit(template, "newer")
    brought = make_project(template, project)
    assert brought.returncode == 0, brought.stderr
    assert "git merge template" in brought.stdout
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "main")) == before
    assert git(project, "log", "--format=%an", "template").split() == ["template", "template"]
    again = make_project(template, project)
    assert again.stdout.endswith("branch template is up to date\n")

    commit(project, "my words")
    git(project, "merge", "--quiet", "--no-edit", "template")
    text = (project / "train.py").read_text()
    assert "(2 * loss).backward()" in text
    assert "seed_everything(1)" in text
    assert (project / "models" / "newer.py").exists()
    for name in ("train_dp.py", "benchmarks", "launch/slurm.sbatch"):
        assert not (project / name).exists()
    assert (project / "README.md").read_text().count("Mine, made from") == 1


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_parts_come_and_go_later_and_an_edited_file_of_one_that_goes_is_a_conflict(
    template: Path,
) -> None:
    project = template.parent / "mine"
    assert make_project(template, project, "amp ema").returncode == 0
    replace(project / "runtime" / "ema.py", '"""Exponential', '"""Mine. Exponential')
    replace(project / "tasks" / "classification.py", 'best_metric = "top1"', 'best_metric = "top5"')
    commit(project, "my average, my metric")

    # More parts come beside the owner's edits.
    assert make_project(template, project, "amp ema unet csv").returncode == 0
    git(project, "merge", "--quiet", "--no-edit", "template")
    for name in ("models/unet.py", "runtime/loggers/csv_file.py", "conf/model/unet.yaml"):
        assert (project / name).exists()
    assert '"unet": UNet' in (project / "models" / "__init__.py").read_text()
    assert "Mine. " in (project / "runtime" / "ema.py").read_text()
    assert 'best_metric = "top5"' in (project / "tasks" / "classification.py").read_text()

    # One goes that was not edited, and one that was.
    assert make_project(template, project, "amp csv").returncode == 0
    merge = ["git", *IDENTITY, "merge", "--no-edit", "template"]
    merged = subprocess.run(merge, cwd=project, capture_output=True, text=True)
    assert merged.returncode == 1
    assert git(project, "diff", "--name-only", "--diff-filter=U").split() == ["runtime/ema.py"]
    assert "Mine. " in (project / "runtime" / "ema.py").read_text()
    assert not (project / "models" / "unet.py").exists()
    assert "unet" not in (project / "models" / "__init__.py").read_text()

    # Without PARTS and SCRIPT, they stay as they are.
    again = make_project(template, project)
    assert again.stdout.endswith("branch template is up to date\n")


def test_a_newer_template_leaves_own_parts_as_they_are(template: Path) -> None:
    project = template.parent / "mine"
    assert make_project(template, project, "amp ema").returncode == 0
    own = {
        "models/tiny_net.py": "class TinyNet: ...\n",
        "tasks/focal.py": "class Focal: ...\n",
        "loaders/index/scenes.py": "def scenes(data): ...\n",
        "train_clip.py": (project / "train.py").read_text().replace("Baseline", "Clipping"),
    }
    tables = {
        "models/__init__.py": ("MODELS: dict[str, Callable[..., nn.Module]] = {\n", "tiny_net"),
        "tasks/__init__.py": ("TASKS: dict[str, type[Task]] = {\n", "focal"),
        "loaders/index/datasets.py": (" = {\n", "scenes"),
    }
    for name, text in own.items():
        (project / name).write_text(text)
    for name, (start, entry) in tables.items():
        replace(project / name, start, f'{start}    "{entry}": {entry},\n')
    commit(project, "my own parts")

    # The template goes on, and the project gets a part more.
    replace(template / "train.py", "    seed_everything(cfg.seed)\n", "    seed_everything(1)\n")
    replace(template / "models" / "__init__.py", "The models by name.", "All models by name.")
    commit(template, "newer")
    assert make_project(template, project, "amp ema unet segmentation table").returncode == 0
    git(project, "merge", "--quiet", "--no-edit", "template")
    for name, text in own.items():
        assert (project / name).read_text() == text
    for name, (_, entry) in tables.items():
        assert f'    "{entry}": {entry},\n' in (project / name).read_text()
    models = (project / "models" / "__init__.py").read_text()
    assert "All models by name." in models
    assert '"unet": UNet' in models
    assert "seed_everything(1)" in (project / "train.py").read_text()


def test_what_cannot_become_a_project_is_told_in_one_line(template: Path) -> None:
    def refused(directory: str) -> str:
        result = make_project(template, directory)
        assert result.returncode == 1
        assert result.stdout == ""
        [line] = result.stderr.splitlines()
        assert line.startswith("make project: ")
        return line

    elsewhere = template.parent
    assert "DIR is missing; write make project DIR=../mine" in refused("")
    for inside in (".", "mine", "conf/mine"):
        assert "is inside the template; use a folder outside" in refused(inside)
    assert not (template / "mine").exists()
    (elsewhere / "full").mkdir()
    (elsewhere / "full" / "thesis.tex").write_text("precious")
    assert "full is not empty; use a folder that does not exist yet" in refused("../full")
    assert "thesis.tex is a file" in refused("../full/thesis.tex")
    git(elsewhere / "full", "init", "--quiet")
    assert "has no branch template" in refused("../full")
    commit(elsewhere / "full", "my thesis")
    git(elsewhere / "full", "branch", "template")
    assert "'my thesis' on branch template is not the template's" in refused("../full")
    assert sorted(path.name for path in (elsewhere / "full").iterdir()) == [".git", "thesis.tex"]

    assert make_project(template, "../mine").returncode == 0
    git(elsewhere / "mine", "switch", "--quiet", "template")
    assert "has branch template checked out; there: git switch main" in refused("../mine")

    replace(template / "train.py", "seed_everything(cfg.seed)", "seed_everything(1)")
    assert "train.py has changes that the project would not have" in refused("../new")
    shutil.rmtree(template / ".git")
    assert "has no git history to export from; clone it with git" in refused("../new")
    assert not (elsewhere / "new").exists()
