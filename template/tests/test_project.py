"""`make project` makes a project that starts and passes its tests, and brings it newer versions."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from template.project import NAME, PARTS, TABLE, files_of, git, listing, with_needs
from tests.helpers import REPOSITORY, commit, refused, replace
from tests.processes import execute
from tests.test_architecture import MODULES, imports_of

# Nobody has told git who they are, or what to ignore.
NOBODY = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
TRACKED = git(REPOSITORY, "ls-files").splitlines()


def clone_template(folder: Path) -> Path:
    """A repository with the tracked files of this one, as its only commit."""
    for name in TRACKED:
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    commit(folder)
    return folder


def make_project(
    template: Path, directory: str | Path, parts: str = "", script: str = "", code: int = 0
) -> str:
    """What `make project` prints in the template's folder; it exits with this code."""
    command = [sys.executable, "-m", "template.project", str(directory), parts, script]
    done = subprocess.run(command, cwd=template, env=NOBODY, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return clone_template(tmp_path / "template")


@pytest.mark.parametrize(
    ("parts", "script"), [("core", ""), ("", ""), ("ddp amp dali", "merged"), ("own predict", "")]
)
def test_a_project_has_the_templates_files_byte_for_byte(parts, script, template: Path) -> None:
    make_project(template, "../my first Project", parts, script)
    project = template.parent / "my first Project"
    files = set(git(project, "ls-files").splitlines())
    assert files <= {*TRACKED}
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
    names = {str(path) for file in TRACKED for path in (file, *Path(file).parents)}
    assert [path for path in paths if not fnmatch.filter(names, path)] == []
    sizes = dict(re.findall(r"^(\w+) +\+?([\d,]+)  \w", listing(TRACKED), re.MULTILINE))
    assert list(sizes) == ["core", *PARTS]
    code = [REPOSITORY / name for name in ("train_ema.py", "runtime/ema.py")]
    assert int(sizes["ema"]) == sum(len(path.read_text().splitlines()) for path in code)


def test_a_newer_template_and_more_parts_are_merged_with_the_users_own(template: Path) -> None:
    project = template.with_name("mine")
    make_project(template, project, "amp ema")
    (project / "models" / "tiny_net.py").write_text("class TinyNet: ...\n")
    replace(project / "train.py", "loss.backward()", "(2 * loss).backward()")
    replace(project / "runtime" / "ema.py", '"""Exponential', '"""Mine. Exponential')
    for name in ("train_ema.py", "models/torchvision.py"):
        (project / name).unlink()
    commit(project)
    replace(project / "README.md", "Made from", "Mine, made from")  # in the middle of something
    before = git(project, "status", "--porcelain"), git(project, "rev-parse", "main")

    # The template goes on, and the project gets more parts.
    replace(template / "train.py", "    seed_everything(cfg.seed)\n", "    seed_everything(1)\n")
    with (template / "models" / "torchvision.py").open("a") as file:
        file.write("# newer\n")
    (template / "models" / "newer.py").touch()
    (template / "loaders" / "check.py").unlink()
    commit(template)
    git(template, "tag", "v2")
    assert "now at v2 (" in make_project(template, project, "amp ema dense")
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "main")) == before
    make_project(template, project)  # without PARTS, they stay as they are
    assert git(project, "diff", "--name-only", "template~", "template") == ""

    # A file that its owner deleted is a conflict if the template edited it; else it stays away.
    commit(project)
    with refused("merge"):
        git(project, "merge", "--no-edit", "template")
    conflicts = git(project, "diff", "--name-only", "--diff-filter=U").split()
    assert conflicts == ["models/torchvision.py"]
    git(project, "rm", "--quiet", *conflicts)
    git(project, "commit", "--quiet", "--no-edit")
    for name, text in {
        "train.py": "(2 * loss).backward()",
        "./train.py": "seed_everything(1)",
        "README.md": "Mine, made from",
        "runtime/ema.py": "Mine. ",
        "models/tiny_net.py": "class TinyNet",
        "models/newer.py": "",
        "conf/model/unet.yaml": "",
    }.items():
        assert text in (project / name).read_text(), name
    for name in ("train_ema.py", "models/torchvision.py", "loaders/check.py", "benchmarks"):
        assert not (project / name).exists()

    # A part goes; of its files, one that has an edit is a conflict.
    make_project(template, project, "amp")
    with refused("merge"):
        git(project, "merge", "--no-edit", "template")
    assert "runtime/ema.py" in git(project, "diff", "--name-only", "--diff-filter=U").split()
    assert "Mine. " in (project / "runtime" / "ema.py").read_text()
    assert not (project / "models" / "unet.py").exists()


def test_what_cannot_become_a_project_is_told_in_one_line(template: Path) -> None:
    def check_refused(message: str, directory: str, parts: str = "", script: str = "") -> None:
        [line] = make_project(template, directory, parts, script, code=1).splitlines()
        assert line.startswith("make project: ")
        assert message in line, line

    full, mine = template.with_name("full"), template.with_name("mine")
    check_refused("make project DIR=../mine", "")
    check_refused("inside the template", "conf/mine")
    full.mkdir()
    (full / "thesis.tex").write_text("precious")
    check_refused("full is not empty", "../full")
    commit(full)
    git(full, "branch", "template")
    check_refused("'all' on branch template", "../full")
    check_refused("no technique", "../none", "dali", "merged")
    check_refused("does not combine", "../none", "", "merged")
    check_refused("(did you mean compose?)", "../none", "compos")
    make_project(template, mine, "core")
    git(mine, "switch", "--quiet", "template")
    check_refused("'template' is already checked out", "../mine")
    replace(template / "train.py", "seed_everything(cfg.seed)", "seed_everything(1)")
    check_refused("train.py has changes", "../none")
    assert not template.with_name("none").exists()
    assert sorted(path.name for path in full.iterdir()) == [".git", "thesis.tex"]


@pytest.mark.parametrize("part", ["core", *PARTS])
def test_a_part_alone_imports_nothing_that_its_project_lacks(part: str) -> None:
    files = {*files_of(with_needs([part]), TRACKED)}
    paths = {module: module.replace(".", "/") for module in MODULES}
    has = {x for x, path in paths.items() if {f"{path}.py", f"{path}/__init__.py"} & files}
    for module in has:
        assert not (imports_of(module) & MODULES.keys()) - has, module


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone_trains(part: str, template: Path) -> None:
    project = template.with_name(part)
    make_project(template, project, part)
    scripts = sorted(path.name for path in project.glob("train*.py"))
    assert scripts[0] == "train.py"
    for script in scripts:
        steps = ["max_steps=2", "log.images=0"]
        execute([script, *steps], template.with_name("prints"), folder=project)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # each of their tests has a limit
@pytest.mark.parametrize(("parts", "script"), [("", ""), ("ddp amp dali", "merged")])
def test_a_project_starts_and_passes_make_test(parts: str, script: str, template: Path) -> None:
    """In one process, since other tests run beside it; not in /dev/shm, which one test replaces."""
    with TemporaryDirectory(dir="/var/tmp") as folder:
        project = Path(folder, "mine")
        make_project(template, project, parts, script)
        python = Path(sys.executable)
        subprocess.run([python, "train.py", "max_steps=2", "log.images=0"], cwd=project, check=True)
        make = ["make", "-o", ".venv/ready", f"BIN={python.parent}", "test"]
        env = {**os.environ, "PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}
        subprocess.run(make, cwd=project, env=env, check=True)
