"""Make or update a project from the template: `make project DIR=../mine PARTS="ddp unet"`.

The project has a history of its own with two branches: `template`, which holds what this script
exports and nothing else, and `main`, which starts there. Run again, the script adds a commit to
`template`; `main` and the project's files do not change until its owner says `git merge template`.

`PARTS` names the parts besides the core (`make parts` lists them; default: those that it had, all
in a new project). `SCRIPT=merged` makes one `train.py` of its techniques, `SCRIPT=each` (the
default in a new project) a script for each. The messages of the commits on `template` hold both.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from compose import MergeError
from conf.reference import with_table
from template.merged import merge_scripts, merged_script, techniques_of
from template.parts import TEMPLATE, cut, left_out, listing, parts_table, refuse, with_needs

NAME = "distributed-training-template"
MESSAGE = "Template at "
PARTS, SCRIPT = "Parts: ", "Script: "
# What measures, shows or makes the template, and the published experiments.
LEFT_OUT = [
    *("template", "benchmarks", "conf/experiment"),
    *("CHANGELOG.md", "SCALING.md", "docs/benchmarks.md", "docs/coming_from.md"),
    *("docs/experiments.md", "docs/side_by_side", "docs/side_by_side.svg"),
]
# Git sets these in hooks; they would point git to the hook's repository.
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def main() -> None:
    """Command line: the project's folder, its parts in one argument, and `each` or `merged`."""
    if sys.argv[1:] == ["--list"]:
        out = tuple(LEFT_OUT)
        files = git(TEMPLATE, "ls-files").splitlines()
        print(listing(TEMPLATE, [file for file in files if not file.startswith(out)]))
        return
    folder, parts, script = [*sys.argv[1:], "", "", ""][:3]
    if not folder:
        refuse("DIR is missing; write make project DIR=../mine")
    try:
        print(make_project(Path(folder).expanduser().resolve(), parts.split(), script))
    except (OSError, MergeError) as error:
        refuse(str(error))
    except subprocess.CalledProcessError as error:
        command = next(word for word in error.cmd[3:] if not word.startswith("-"))
        refuse(f"git {command} failed: {' '.join(error.stderr.split())}")


def make_project(folder: Path, names: list[str], script: str) -> str:
    """Make the project, or bring the template's last commit to its branch `template`.

    Args:
        folder: folder of the project.
        names: names of its parts; empty: those that it had, in a new project all.
        script: `each` or `merged`; empty: as it was, in a new project `each`.

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
    if previous:
        body = git(folder, "log", "-1", "--format=%b", previous).splitlines()
        names = names or next((x.removeprefix(PARTS).split() for x in body if PARTS in x), [])
        script = script or next((x.removeprefix(SCRIPT) for x in body if SCRIPT in x), "")
    if script not in ("", "each", "merged"):
        refuse(f"SCRIPT={script} is not possible; use each or merged")
    chosen = with_needs(names)
    if script == "merged":
        chosen -= {"compose", "scripts"}
        if not techniques_of(chosen):
            refuse("SCRIPT=merged: there is no technique among PARTS, such as ddp or amp")
        if not find_spec("ruff"):
            refuse("SCRIPT=merged sorts imports with ruff, which is not installed; run make setup")
        merged_script(techniques_of(chosen))

    with tempfile.TemporaryDirectory() as temporary:
        files, index = Path(temporary, "files"), Path(temporary, "index")
        export(name, chosen, files)
        if script == "merged":
            merge_scripts(files, techniques_of(chosen))
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
    facts = [PARTS + " ".join(names)] * bool(names) + [SCRIPT + script] * bool(script)
    message = ["-m", MESSAGE + version, *(["-m", "\n".join(facts)] if facts else [])]
    commit = git(folder, "commit-tree", tree, *parent, *message)
    git(folder, "update-ref", "refs/heads/template", commit)
    if not is_new:
        return f"{folder}: branch template is now at {version}; there: git merge template"
    git(folder, "reset", "--quiet", "--hard", commit)
    return f"{folder} is a project of its own; there: make train"


def last_version(folder: Path) -> tuple[str, str]:
    """Return the name of a project, and the last commit on its branch `template`."""
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


def export(name: str, chosen: set[str], files: Path) -> None:
    """Write what such a project has of the template's last commit into the folder `files`."""
    index = files.with_name("index-of-template")
    git(TEMPLATE, "read-tree", "HEAD", index=index)
    others = [*LEFT_OUT, *left_out(chosen)]
    git(TEMPLATE, "rm", "-r", "--quiet", "--cached", "--ignore-unmatch", *others, index=index)
    git(TEMPLATE, "checkout-index", "--all", f"--prefix={files}/", index=index)

    readme = git(TEMPLATE, "show", "HEAD:template/README.md")
    (files / "README.md").write_text(readme.replace("NAME", name, 1) + "\n")
    kept = {str(path.relative_to(files)) for path in files.rglob("*")}
    requirements = dependencies(files / "pyproject.toml")
    cut(files, chosen, sorted(set(git(TEMPLATE, "ls-files").splitlines()) - kept))
    readme = (files / "README.md").read_text()  # after cutting: some of the files are gone
    table = parts_table(chosen, files)
    (files / "README.md").write_text(readme.replace("\nPARTS\n", f"\n{table}", 1))
    keys = files / "docs" / "configuration.md"
    keys.write_text(with_table(keys.read_text(), files / "conf"))

    package = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "project"
    pyproject = (files / "pyproject.toml").read_text()
    of_the_template = r'^(description|bench) = .*\n|, "(benchmarks|template)[^"]*"'
    pyproject = re.sub(of_the_template, "", pyproject, flags=re.MULTILINE)
    (files / "pyproject.toml").write_text(pyproject.replace(f'"{NAME}"', f'"{package}"'))

    gone = requirements - dependencies(files / "pyproject.toml")
    pins = without(gone, (files / "requirements.txt").read_text())
    (files / "requirements.txt").write_text(pins.replace(NAME, package))


def dependencies(pyproject: Path) -> set[str]:
    """Return the packages that a project asks for itself."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    return {re.split(r"[^\w.-]", line)[0] for line in wanted}


def without(gone: set[str], requirements: str) -> str:
    """Return pinned requirements without packages that the project does not ask for, unless others
    need them."""
    pins = re.findall(r"^\S.*\n(?: .*\n)*", requirements, re.MULTILINE)
    removed: set[str] = set()
    kept: list[str] = []
    while len(kept) != len(pins):
        kept, pins = pins, []
        for pin in kept:
            name = pin.partition("==")[0]
            needed_by = set(re.findall(r"(?:via|#  ) (\S+)", pin))
            others = needed_by - removed - ({NAME} if name in gone else set())
            if needed_by and not others:
                removed.add(name)
            else:
                pins.append(pin)
    return "".join(
        line for pin in pins for line in pin.splitlines(True) if line.strip(" #\n") not in removed
    )


def git(folder: Path, *arguments: str, index: Path | None = None) -> str:
    """Run git and return what it prints, without the last line's end; CalledProcessError with its
    words if it fails.

    Args:
        folder: where it runs.
        arguments: arguments of git.
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


if __name__ == "__main__":
    main()
