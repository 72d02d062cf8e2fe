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
from importlib.util import find_spec
from pathlib import Path

from compose import BASELINE, MergeError, find_techniques
from template.merged import launcher_of, merged_script
from template.parts import (
    NOW,
    TEMPLATE,
    files_of,
    listing,
    parts_table,
    refuse,
    unused_packages,
    with_needs,
)

NAME = "distributed-training-template"
MESSAGE = "Template at "
PARTS, SCRIPT = "Parts: ", "Script: "
README = "template/README.md"
# Git sets these in hooks; they would point git to the hook's repository.
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def main() -> None:
    """Command line: the project's folder, its parts in one argument, and `each` or `merged`."""
    if sys.argv[1:] == ["--list"]:
        print(listing(git(TEMPLATE, "ls-files").splitlines()))
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
        had = next((x.split() for x in body if PARTS in x), ["compose"])
        if names and "compose" not in had and git(folder, "ls-tree", previous, "compose.py"):
            names = [*names, "compose"]  # which came with each technique in earlier versions
    names = list(dict.fromkeys(NOW.get(name, name) for name in names))
    if script not in ("", "each", "merged"):
        refuse(f"SCRIPT={script} is not possible; use each or merged")
    chosen = with_needs(names)
    merged = ""
    if script == "merged":
        if not chosen & find_techniques().keys():
            refuse("SCRIPT=merged: there is no technique among PARTS, such as ddp or amp")
        if not find_spec("ruff"):
            refuse("SCRIPT=merged sorts imports with ruff, which is not installed; run make setup")
        chosen -= {"compose"}
        merged = merged_script(chosen)

    with tempfile.TemporaryDirectory() as temporary:
        files, index = Path(temporary, "files"), Path(temporary, "index")
        export(name, chosen, merged, files)
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

    date = git(TEMPLATE, "log", "-1", "--date=short", "--format=%ad")
    version = f"{git(TEMPLATE, 'describe', '--tags', '--always')} ({date})"  # a release is a tag
    parent = ("-p", previous) if previous else ()
    facts = [PARTS + " ".join(names)] * bool(names) + [SCRIPT + script] * bool(script)
    message = ["-m", MESSAGE + version, *(["-m", "\n".join(facts)] if facts else [])]
    commit = git(folder, "commit-tree", tree, *parent, *message)
    git(folder, "update-ref", "refs/heads/template", commit)
    if not is_new:
        behind = commits_since(git(folder, "log", "-1", "--format=%s", previous))
        return f"{folder}: branch template is now at {version}{behind}; there: git merge template"
    git(folder, "reset", "--quiet", "--hard", commit)
    return f"{folder} is a project of its own; there: make setup"


def commits_since(message: str) -> str:
    """Say how many commits the template has made since the one that a message names; nothing if it
    does not know that one."""
    before = message.removeprefix(MESSAGE).split()[0]
    try:
        count = git(TEMPLATE, "rev-list", "--count", f"{before}..HEAD")
    except subprocess.CalledProcessError:
        return ""
    return f", {count} commits after {before}" if int(count) else ""


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


def export(name: str, chosen: set[str], merged: str, files: Path) -> None:
    """Write a project into the folder `files`: files of the template's last commit, unchanged, and
    those that are made for it.

    Args:
        name: of the project.
        chosen: its parts.
        merged: its only training script; empty: it has one for each technique.
        files: folder that does not exist yet.
    """
    index = files.with_name("index-of-template")
    git(TEMPLATE, "read-tree", "HEAD", index=index)
    tracked = git(TEMPLATE, "ls-files", index=index).splitlines()
    kept = files_of(chosen | ({"scripts"} if not merged else set()), tracked)
    if merged:
        kept = [file for file in kept if not re.fullmatch(r"train_\w+\.py", file)]
    gone = set(tracked) - set(kept)
    git(TEMPLATE, "update-index", "--force-remove", "--stdin", index=index, stdin="\n".join(gone))
    git(TEMPLATE, "checkout-index", "--all", f"--prefix={files}/", index=index)
    if merged:
        (files / BASELINE).write_text(merged)
    readme = lines_without(gone, (TEMPLATE / README).read_text()).replace("NAME", name, 1)
    start = ""
    if merged:
        command = f"{launcher_of(merged)}train.py"
        readme = readme.replace("python train.py", command)
        techniques = sorted(chosen & find_techniques().keys())
        scripts = " and ".join(f"`train_{technique}.py`" for technique in techniques)
        start = (
            f"`train.py` is the merge of {scripts}, which pages name; where they say "
            f"`python train.py`, write `{command}`.\n\n"
        )
    readme = readme.replace("START\n\n", start)
    (files / "README.md").write_text(readme.replace("PARTS\n", parts_table(chosen, gone), 1))

    package = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "project"
    pyproject, unused = (files / "pyproject.toml").read_text(), unused_packages(chosen)
    of_the_template = r'^(description|bench) = .*\n|, "(benchmarks|template)[^"]*"'
    pyproject = re.sub(of_the_template, "", pyproject, flags=re.MULTILINE)
    pyproject = pyproject.replace(f'"{NAME}"', f'"{package}"')
    lines = [without_packages(line, unused) for line in pyproject.splitlines(True)]
    if "Dockerfile" not in kept:  # which names some of the extras
        lines = [line for line in lines if not line.endswith("= []\n")]
    (files / "pyproject.toml").write_text("".join(lines))
    template = packages_in((TEMPLATE / "pyproject.toml").read_text())
    unused = set(template) - set(packages_in("".join(lines)))  # of its benchmarks
    pins = without(unused, (files / "requirements.txt").read_text())
    (files / "requirements.txt").write_text(pins.replace(NAME, package))


def lines_without(gone: set[str], page: str) -> str:
    """Return a page without the lines that name a file that is gone, such as rows of a table."""
    lines = page.splitlines(True)
    return "".join(line for line in lines if not gone.intersection(re.findall(r"[\w./]+", line)))


def without_packages(line: str, unused: set[str]) -> str:
    """Return a line of pyproject.toml without what it asks for if all of that is unused; an extra
    stays, empty, for commands that name it."""
    packages = packages_in(line)
    if not packages or not unused.issuperset(packages):
        return line
    return re.sub(r"\[.*\]", "[]", line) if " = [" in line else ""


def packages_in(text: str) -> list[str]:
    """Return the packages that lines of pyproject.toml ask for."""
    return re.findall(r'"([\w-]+)(?:\[\w+\])?>=', text)


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


def git(folder: Path, *arguments: str, index: Path | None = None, stdin: str = "") -> str:
    """Run git and return what it prints, without the last line's end; CalledProcessError with its
    words if it fails.

    Args:
        folder: where it runs.
        arguments: arguments of git.
        index: a file in place of the repository's own index.
        stdin: what it reads.
    """
    env = {key: value for key, value in os.environ.items() if key not in OF_A_HOOK}
    for role in ("AUTHOR", "COMMITTER"):  # of commits that nobody writes
        env.update({f"GIT_{role}_NAME": "template", f"GIT_{role}_EMAIL": "template@localhost"})
    if index is not None:
        env["GIT_INDEX_FILE"] = str(index)
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, env=env, input=stdin, text=True)
    return done.stdout.rstrip("\n")


if __name__ == "__main__":
    main()
