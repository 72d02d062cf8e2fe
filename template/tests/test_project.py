"""`make project` makes a project of its own, and brings it newer versions of the template."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from template.parts import TABLE
from template.project import git
from tests.helpers import REPOSITORY, replace

# Nobody has told git who they are, or what to ignore.
NOBODY = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def clone_template(folder: Path) -> Path:
    """A repository with the tracked files of this one, as its only commit."""
    for name in git(REPOSITORY, "ls-files").splitlines():
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    git(folder, "init", "--quiet", "--initial-branch=main")
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


def made(template: Path, directory: str | Path, parts: str = "", script: str = "") -> str:
    """What it printed; it did what it should."""
    done = make_project(template, directory, parts, script)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return clone_template(tmp_path / "template")


def test_a_project_has_its_own_name_history_and_nothing_of_the_template_alone(template) -> None:
    (template / "docs" / "photo.jpg").write_bytes(b"\xff\xd8")
    commit(template, "a photo")
    made(template, "../my first Project")
    project = template.parent / "my first Project"
    assert (project / "docs" / "photo.jpg").read_bytes() == b"\xff\xd8"
    assert (project / "README.md").read_text().startswith("# my first Project\n")
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    assert settings["project"]["name"] == "my-first-project"
    assert git(project, "status", "--porcelain", "--ignored") == ""
    assert git(project, "branch", "--format=%(refname:short)").split() == ["main", "template"]
    assert git(project, "rev-list", "--count", "--all") == "1"
    assert os.access(project / ".ci" / "run", os.X_OK)
    assert not [name for name in TABLE["files"]["template"] if (project / name).exists()]
    gone = re.compile("torchcodec[=>]|distributed-training-template|benchmarks|experiment=(?!fine)")
    for name in git(project, "ls-files", "*.md", "*.toml", "*.txt").splitlines():
        assert not gone.search((project / name).read_text()), name


def test_a_newer_template_and_more_parts_are_merged_with_the_users_own(template: Path) -> None:
    project = template.parent / "mine"
    made(template, project, "amp ema")
    own = {
        "models/tiny_net.py": "class TinyNet: ...\n",
        "loaders/layouts/scenes.py": "def scenes(data): ...\n",
        "train_clip.py": (project / "train.py").read_text().replace("Baseline", "Clipping"),
    }
    for name, text in own.items():
        (project / name).write_text(text)
    replace(project / "train.py", "loss.backward()", "(2 * loss).backward()")
    replace(project / "runtime" / "ema.py", '"""Exponential', '"""Mine. Exponential')
    (project / "train_ema.py").unlink()
    commit(project, "my own parts")
    replace(project / "README.md", "Made from", "Mine, made from")  # in the middle of something
    before = git(project, "status", "--porcelain"), git(project, "rev-parse", "main")

    # The template goes on, and the project gets more parts.
    replace(template / "train.py", "    seed_everything(cfg.seed)\n", "    seed_everything(1)\n")
    replace(template / "models" / "__init__.py", "The models by name", "All models by name")
    (template / "models" / "newer.py").write_text("")
    (template / "docs" / "recipes.md").unlink()
    commit(template, "newer")
    git(template, "tag", "v2")
    brought = made(template, project, "amp ema dense")
    assert "now at v2 (" in brought
    assert "git merge template" in brought
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "main")) == before
    assert git(project, "log", "--format=%an", "template").split() == ["template", "template"]
    made(template, project)  # without PARTS, they stay as they are
    assert git(project, "diff", "--name-only", "template~", "template") == ""

    commit(project, "my words")
    git(project, "merge", "--quiet", "--no-edit", "template")
    assert all((project / name).read_text() == text for name, text in own.items())
    for name, text in [
        *(("train.py", "(2 * loss).backward()"), ("train.py", "seed_everything(1)")),
        *(("models/__init__.py", "All models by name"), ("runtime/ema.py", "Mine. ")),
        *(("README.md", "Mine, made from"), ("models/newer.py", ""), ("conf/model/unet.yaml", "")),
    ]:
        assert text in (project / name).read_text(), name
    for name in ("train_ema.py", "benchmarks", "docs/recipes.md"):
        assert not (project / name).exists()

    # A part goes; of its files, one that has an edit is a conflict.
    made(template, project, "amp")
    with pytest.raises(subprocess.CalledProcessError):
        git(project, "merge", "--no-edit", "template")
    assert "runtime/ema.py" in git(project, "diff", "--name-only", "--diff-filter=U").split()
    assert "Mine. " in (project / "runtime" / "ema.py").read_text()
    assert not (project / "models" / "unet.py").exists()


def test_what_cannot_become_a_project_is_told_in_one_line(template: Path) -> None:
    def check_refused(message: str, directory: str, parts: str = "", script: str = "") -> None:
        result = make_project(template, directory, parts, script)
        assert (result.returncode, result.stdout) == (1, "")
        [line] = result.stderr.splitlines()
        assert line.startswith("make project: ")
        assert message in line, line

    full, mine = template.with_name("full"), template.with_name("mine")
    check_refused("make project DIR=../mine", "")
    check_refused("inside the template", "conf/mine")
    full.mkdir()
    (full / "thesis.tex").write_text("precious")
    check_refused("full is not empty", "../full")
    check_refused("full/thesis.tex", "../full/thesis.tex")
    git(full, "init", "--quiet", "--initial-branch=template")
    commit(full, "my thesis")
    check_refused("'my thesis' on branch template", "../full")
    check_refused("no technique", "../none", "dali", "merged")
    check_refused("does not combine", "../none", "", "merged")
    check_refused("(did you mean compose?)", "../none", "compos")
    made(template, mine, "core")
    git(mine, "switch", "--quiet", "template")
    check_refused("'template' is already checked out", "../mine")
    replace(template / "train.py", "seed_everything(cfg.seed)", "seed_everything(1)")
    check_refused("train.py has changes", "../none")
    shutil.rmtree(template / ".git")
    check_refused("not a git repository", "../none")
    assert not template.with_name("none").exists()
    assert sorted(path.name for path in full.iterdir()) == [".git", "thesis.tex"]
