"""`make project` makes a project of its own, and brings it newer versions of the template."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from template.project import NAME, PARTS, TABLE, git, listing
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


@pytest.mark.parametrize(
    ("parts", "script"), [("core", ""), ("", ""), ("ddp amp dali", "merged"), ("own predict", "")]
)
def test_a_project_has_the_templates_files_byte_for_byte(parts, script, template: Path) -> None:
    made(template, "../my first Project", parts, script)
    project = template.parent / "my first Project"
    files, all_files = (set(git(place, "ls-files").splitlines()) for place in (project, template))
    assert files <= all_files
    with_name = {"README.md", "pyproject.toml", "requirements.txt"}
    for name in files - with_name - ({"train.py"} if script else set()):
        assert (project / name).read_bytes() == (template / name).read_bytes(), name
    assert {name for name in files if name.endswith(".md")} == {"README.md", "data/README.md"}
    assert not [name for name in TABLE["files"]["template"] if (project / name).exists()]

    assert (project / "README.md").read_text().startswith("# my first Project\n")
    ours, theirs = ((place / "pyproject.toml").read_text() for place in (project, template))
    assert tomllib.loads(ours)["project"]["name"] == "my-first-project"
    assert ours == theirs.replace(NAME, "my-first-project")
    assert git(project, "status", "--porcelain", "--ignored") == ""
    assert git(project, "branch", "--format=%(refname:short)").split() == ["main", "template"]
    assert git(project, "rev-list", "--count", "--all") == "1"
    if script:
        assert [path.name for path in project.glob("train*.py")] == ["train.py"]
        text = (project / "train.py").read_text()
        command = "torchrun --standalone --nproc_per_node=2 train.py"
        assert re.findall(r"Start with `(.*?)`", text) == [command]
        assert "DistributedDataParallel(" in text
        assert "scaler.scale(loss).backward()" in text
        assert "# new #" not in text


def test_the_parts_are_at_most_16_and_listed_with_the_lines_that_each_adds() -> None:
    assert len(PARTS) <= 16
    paths = [*TABLE["with"], *(path for paths in TABLE["files"].values() for path in paths)]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    sizes = dict(re.findall(r"^(\w+) +\+?([\d,]+)  \w", listing(paths), re.MULTILINE))
    assert list(sizes) == ["core", *PARTS]
    code = [REPOSITORY / name for name in ("train_ema.py", "runtime/ema.py")]
    assert int(sizes["ema"]) == sum(len(path.read_text().splitlines()) for path in code)


def test_a_newer_template_and_more_parts_are_merged_with_the_users_own(template: Path) -> None:
    project = template.parent / "mine"
    made(template, project, "amp ema")
    own = {
        "models/tiny_net.py": "class TinyNet: ...\n",
        "train_clip.py": (project / "train.py").read_text().replace("Baseline", "Clipping"),
    }
    for name, text in own.items():
        (project / name).write_text(text)
    replace(project / "train.py", "loss.backward()", "(2 * loss).backward()")
    replace(project / "runtime" / "ema.py", '"""Exponential', '"""Mine. Exponential')
    for name in ("train_ema.py", "models/torchvision.py"):
        (project / name).unlink()
    commit(project, "my own parts")
    replace(project / "README.md", "Made from", "Mine, made from")  # in the middle of something
    before = git(project, "status", "--porcelain"), git(project, "rev-parse", "main")

    # The template goes on, and the project gets more parts.
    replace(template / "train.py", "    seed_everything(cfg.seed)\n", "    seed_everything(1)\n")
    with (template / "models" / "torchvision.py").open("a") as file:
        file.write("# newer\n")
    (template / "models" / "newer.py").write_text("")
    (template / "loaders" / "check.py").unlink()
    commit(template, "newer")
    git(template, "tag", "v2")
    assert "now at v2 (" in made(template, project, "amp ema dense")
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "main")) == before
    made(template, project)  # without PARTS, they stay as they are
    assert git(project, "diff", "--name-only", "template~", "template") == ""

    # A file that its owner deleted is a conflict if the template edited it; else it stays away.
    commit(project, "my words")
    with pytest.raises(subprocess.CalledProcessError):
        git(project, "merge", "--no-edit", "template")
    conflicts = git(project, "diff", "--name-only", "--diff-filter=U").split()
    assert conflicts == ["models/torchvision.py"]
    git(project, "rm", "--quiet", *conflicts)
    git(project, "commit", "--quiet", "--no-edit")
    assert all((project / name).read_text() == text for name, text in own.items())
    for name, text in [
        *(("train.py", "(2 * loss).backward()"), ("train.py", "seed_everything(1)")),
        *(("README.md", "Mine, made from"), ("runtime/ema.py", "Mine. ")),
        *(("models/newer.py", ""), ("conf/model/unet.yaml", "")),
    ]:
        assert text in (project / name).read_text(), name
    for name in ("train_ema.py", "models/torchvision.py", "loaders/check.py", "benchmarks"):
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
    assert not template.with_name("none").exists()
    assert sorted(path.name for path in full.iterdir()) == [".git", "thesis.tex"]
