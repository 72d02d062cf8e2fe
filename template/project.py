"""Make a project out of the template, or bring it a newer version: `make project DIR=../mine`.

The project has a history of its own with two branches: `template`, which holds what this script exports
and nothing else, and `main`, which starts there. Run again, the script adds a commit to `template`; neither
`main` nor a file of the project is touched until its owner says `git merge template`.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

TEMPLATE = Path(__file__).resolve().parents[1]
NAME = "distributed-training-template"
MESSAGE = "Template at "
# What measures, shows or makes the template, the published experiments, and the tests of these.
LEFT_OUT = [
    *("template", "benchmarks", "conf/experiment", "loaders/generate.py"),
    *("SCALING.md", "docs/benchmarks.md", "docs/experiments.md", "docs/side_by_side.svg"),
    *("tests/busy.py", "tests/test_benchmarks.py", "tests/test_experiments.py"),
    *("tests/test_generate.py", "tests/test_guide.py", "tests/test_project.py"),
    *("tests/test_gpu_check.py", "launch/gpu_wheels.sh"),
]
# In a hook that runs this, they tell of the hook's own repository.
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1]:
        refuse("DIR is missing; write make project DIR=../mine")
    try:
        print(make_project(Path(sys.argv[1]).expanduser().resolve()))
    except OSError as error:
        refuse(str(error))
    except subprocess.CalledProcessError as error:
        refuse(f"git {error.cmd[3]} failed: {' '.join(error.stderr.split())}")


def make_project(folder: Path) -> str:
    """Make the project, or bring the template's last commit to its branch `template`.

    Returns:
        What was done, and the command that comes next.
    """
    if not (TEMPLATE / ".git").exists():
        refuse(f"{TEMPLATE} has no git history to export from; clone it with git")
    if changed := git(TEMPLATE, "diff", "--name-only", "HEAD").splitlines():
        refuse(f"{changed[0]} has changes that the project would not have; commit or stash them")
    if folder == TEMPLATE or TEMPLATE in folder.parents:
        refuse(f"DIR={folder} is inside the template; use a folder outside, such as ../mine")
    if folder.exists() and not folder.is_dir():
        refuse(f"DIR={folder} is a file; use a folder that does not exist yet")
    is_new = not folder.exists() or not any(folder.iterdir())
    name, previous = (folder.name, "") if is_new else last_version(folder)

    with tempfile.TemporaryDirectory() as temporary:
        files, index = Path(temporary, "files"), Path(temporary, "index")
        export(name, files)
        if is_new:
            folder.mkdir(parents=True, exist_ok=True)
            git(folder, "init", "--quiet")
            git(folder, "symbolic-ref", "HEAD", "refs/heads/main")
        # Neither the project's own index nor its files have a part in this.
        places = (f"--git-dir={folder / '.git'}", f"--work-tree={files}")
        git(files, *places, "add", "--all", "--force", ".", index=index)
        tree = git(folder, "write-tree", index=index)
    if previous and tree == git(folder, "rev-parse", f"{previous}^{{tree}}"):
        return f"{folder}: branch template is up to date"

    version = git(TEMPLATE, "log", "-1", "--date=short", "--format=%h (%ad)")
    parent = ("-p", previous) if previous else ()
    commit = git(folder, "commit-tree", tree, *parent, "-m", MESSAGE + version)
    git(folder, "update-ref", "refs/heads/template", commit)
    if not is_new:
        return f"{folder}: branch template is now at {version}; there: git merge template"
    git(folder, "reset", "--quiet", "--hard", commit)
    return f"{folder} is a project of its own; there: make train"


def last_version(folder: Path) -> tuple[str, str]:
    """The name of a project, and the last commit on its branch `template`."""
    fix = "use a folder that does not exist yet, or a project that make project has made"
    if not (folder / ".git").exists():
        refuse(f"DIR={folder} is not empty; {fix}")
    commit = git(folder, "for-each-ref", "--format=%(objectname)", "refs/heads/template")
    if not commit:
        clone = "in the clone of a project, git branch template origin/template brings it"
        refuse(f"DIR={folder} has no branch template; {clone}; else {fix}")
    message = git(folder, "log", "-1", "--format=%s", commit)
    if not message.startswith(MESSAGE):
        refuse(
            f"DIR={folder}: {message!r} on branch template is not the template's; move it to main"
        )
    if git(folder, "rev-parse", "--symbolic-full-name", "HEAD") == "refs/heads/template":
        refuse(f"DIR={folder} has branch template checked out; there: git switch main")
    first_line, *_ = git(folder, "show", f"{commit}:README.md").splitlines()
    return first_line.removeprefix("# "), commit


def export(name: str, files: Path) -> None:
    """Write what a project of this name has of the template's last commit into a folder."""
    index = files.with_name("index-of-template")
    git(TEMPLATE, "read-tree", "HEAD", index=index)
    git(TEMPLATE, "rm", "-r", "--quiet", "--cached", "--ignore-unmatch", *LEFT_OUT, index=index)
    git(TEMPLATE, "checkout-index", "--all", f"--prefix={files}/", index=index)

    readme = git(TEMPLATE, "show", "HEAD:template/README.md")
    (files / "README.md").write_text(readme.replace("NAME", name) + "\n")

    package = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "project"
    pyproject = (files / "pyproject.toml").read_text()
    pyproject = re.sub(r"^(description|bench) = .*\n", "", pyproject, flags=re.MULTILINE)
    (files / "pyproject.toml").write_text(pyproject.replace(f'"{NAME}"', f'"{package}"'))

    requirements = without("matplotlib", (files / "requirements.txt").read_text())
    (files / "requirements.txt").write_text(requirements.replace(NAME, package))


def without(package: str, requirements: str) -> str:
    """Pinned requirements without a package, and without those that it alone needs."""
    pins = re.findall(r"^\S.*\n(?: .*\n)*", requirements, re.MULTILINE)
    gone = {package}
    kept: list[str] = []
    while len(kept) != len(pins):
        kept, pins = pins, []
        for pin in kept:
            needed_by = re.findall(r"(?:via|#  ) (\S+)", pin)
            if pin.startswith(f"{package}==") or (needed_by and gone.issuperset(needed_by)):
                gone.add(pin.partition("==")[0])
            else:
                pins.append(pin)
    return re.sub(rf" +#   ({'|'.join(gone)})\n", "", "".join(pins))


def git(folder: Path, *arguments: str, index: Path | None = None) -> str:
    """What git prints, without the last line's end; CalledProcessError with its words if it fails.

    Args:
        folder: where it runs.
        arguments: of git.
        index: a file in place of the repository's own index.
    """
    env = {key: value for key, value in os.environ.items() if key not in OF_A_HOOK}
    for role in ("AUTHOR", "COMMITTER"):  # of commits that nobody writes
        env.update({f"GIT_{role}_NAME": "template", f"GIT_{role}_EMAIL": "template@localhost"})
    if index is not None:
        env["GIT_INDEX_FILE"] = str(index)
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, env=env, text=True)
    return done.stdout.rstrip("\n")


def refuse(message: str) -> NoReturn:
    sys.exit(f"make project: {message}")


if __name__ == "__main__":
    main()
