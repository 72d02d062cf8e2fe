"""`make project` makes a project of its own, and brings it newer versions of the template."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from template.parts import LEFT_OUT
from template.project import git
from tests.helpers import REPOSITORY, replace

# Nobody has told git who they are, or what to ignore.
NOBODY = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def clone_template(folder: Path) -> Path:
    """A repository with the tracked files of this one, as its only commit."""
    names = git(REPOSITORY, "ls-files").splitlines()
    for name in names:
        path = REPOSITORY / name
        if path.is_file() and not path.is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder / name)
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


def made(template: Path, directory: str | Path, parts: str = "", script: str = "") -> str:
    """What it printed; it did what it should."""
    done = make_project(template, directory, parts, script)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return clone_template(tmp_path / "template")


@pytest.mark.parametrize("script", ["each", "merged"])
def test_files_that_are_no_text_are_copied_and_those_of_loggers_are_not(template, script) -> None:
    (template / "docs" / "photo.jpg").write_bytes(b"\xff\xd8")
    for logger in ("mlruns", "wandb"):
        (template / logger).mkdir()
        (template / logger / "weights").write_bytes(b"\xff")
    (template / "mlflow.db").write_bytes(b"\xff")
    commit(template, "a photo")
    made(template, "../mine", "amp", script)
    project = template.parent / "mine"
    assert (project / "docs" / "photo.jpg").read_bytes() == b"\xff\xd8"
    assert not {path.name for path in project.iterdir()} & {"mlruns", "wandb", "mlflow.db"}


def test_a_project_has_its_own_name_history_and_no_part_of_the_template_alone(template) -> None:
    made(template, "../my first Project")
    project = template.parent / "my first Project"
    assert (project / "README.md").read_text().startswith("# my first Project\n")
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    assert settings["project"]["name"] == "my-first-project"
    assert git(project, "status", "--porcelain") == ""
    assert git(project, "branch", "--format=%(refname:short)").split() == ["main", "template"]
    assert git(project, "rev-list", "--count", "--all") == "1"
    assert os.access(project / ".ci" / "run", os.X_OK)
    for name in LEFT_OUT:
        assert (REPOSITORY / name).exists()
        assert not (project / name).exists()
    gone = re.compile(r"matplotlib|distributed-training-template|benchmarks|experiment=")
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
    (template / "benchmarks" / "newer.py").write_text("")
    (template / "docs" / "recipes.md").unlink()
    commit(template, "newer")
    brought = made(template, project, "amp ema unet segmentation csv")
    assert "git merge template" in brought
    assert ", 1 commits after " in brought
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "main")) == before
    assert git(project, "log", "--format=%an", "template").split() == ["template", "template"]
    # Without PARTS, they stay as they are.
    assert made(template, project).endswith("branch template is up to date\n")

    commit(project, "my words")
    git(project, "merge", "--quiet", "--no-edit", "template")
    assert all((project / name).read_text() == text for name, text in own.items())
    for name, texts in {
        "train.py": ("(2 * loss).backward()", "seed_everything(1)"),
        "models/__init__.py": ("All models by name",),
        "runtime/ema.py": ("Mine. ",),
        "README.md": ("Mine, made from",),
        "models/newer.py": (),
        "models/unet.py": (),
        "runtime/loggers/csv.py": (),
        "conf/model/unet.yaml": (),
    }.items():
        assert all((project / name).read_text().count(text) == 1 for text in texts), name
    for name in ("train_ema.py", "benchmarks", "docs/recipes.md"):
        assert not (project / name).exists()


def test_a_part_goes_and_an_edited_file_of_one_that_goes_is_a_conflict(template: Path) -> None:
    project = template.parent / "mine"
    made(template, project, "amp ema unet")
    replace(project / "runtime" / "ema.py", '"""Exponential', '"""Mine. Exponential')
    commit(project, "my average")
    made(template, project, "amp")
    with pytest.raises(subprocess.CalledProcessError):
        git(project, "merge", "--no-edit", "template")
    assert git(project, "diff", "--name-only", "--diff-filter=U").split() == ["runtime/ema.py"]
    assert "Mine. " in (project / "runtime" / "ema.py").read_text()
    assert not (project / "models" / "unet.py").exists()
    assert "unet" not in (project / "models" / "__init__.py").read_text()


def test_what_cannot_become_a_project_is_told_in_one_line(template: Path) -> None:
    def check_refused(directory: str, *messages: str, parts: str = "", script: str = "") -> None:
        result = make_project(template, directory, parts, script)
        assert (result.returncode, result.stdout) == (1, "")
        [line] = result.stderr.splitlines()
        assert line.startswith("make project: ")
        assert all(message in line for message in messages), line

    full, mine = template.with_name("full"), template.with_name("mine")
    check_refused("", "DIR", "make project DIR=../mine")
    for inside in (".", "conf/mine"):
        check_refused(inside, str(template), "inside the template")
    assert not (template / "conf" / "mine").exists()
    full.mkdir()
    (full / "thesis.tex").write_text("precious")
    check_refused("../full", "full is not empty")
    check_refused("../full/thesis.tex", "thesis.tex is a file")
    git(full, "init", "--quiet")
    check_refused("../full", "has no branch template")
    commit(full, "my thesis")
    git(full, "branch", "template")
    check_refused("../full", "'my thesis' on branch template")
    check_refused("../none", "no technique", parts="dali", script="merged")
    for parts in ("ddp fsdp", ""):
        check_refused("../none", "does not combine", parts=parts, script="merged")
    assert not template.with_name("none").exists()
    assert sorted(path.name for path in full.iterdir()) == [".git", "thesis.tex"]

    made(template, mine, "core")
    git(mine, "config", "filter.none.required", "true")  # git add cannot do what it needs
    attributes = mine / ".git" / "info" / "attributes"
    attributes.write_text("* filter=none\n")
    check_refused("../mine", "git add failed")
    attributes.unlink()
    git(mine, "switch", "--quiet", "template")
    check_refused("../mine", "branch template checked out", "git switch main")

    replace(template / "train.py", "seed_everything(cfg.seed)", "seed_everything(1)")
    check_refused("../new", "train.py has changes")
    shutil.rmtree(template / ".git")
    check_refused("../new", "no git history")
    assert not template.with_name("new").exists()
