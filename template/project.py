"""Make or update a project from the template: `make project DIR=../mine PARTS="ddp amp"`.

The project has a history of its own with two branches: `template`, which holds what this script
writes and nothing else, and `main`, which starts there. Run again, the script adds a commit to
`template`; `main` and the project's files do not change until its owner says `git merge template`.

`PARTS` names the parts besides the core (`make parts` lists them; `core` for none; default: those
that it had, all in a new project). `SCRIPT=merged` makes one `train.py` of its techniques,
`SCRIPT=each` (the default in a new project) a script for each. The messages of the commits on
`template` hold both.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.errors import UserError
from template.parts import PARTS, TABLE, TEMPLATE, files_of, listing, unused_packages, with_needs
from tools.compose import BASELINE, MARKER, compose, find_techniques

NAME = "distributed-training-template"
OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables that git sets in hooks, which would point it to the hook's repository."""
MESSAGE = "Template at "
FACTS = "%s%n%(trailers:key=Parts,valueonly,separator=)"
FACTS += "%n%(trailers:key=Script,valueonly,separator=)"


def main() -> None:
    """Command line: the project's folder, its parts in one argument, and `each` or `merged`."""
    folder, names, script = [*sys.argv[1:], "", "", ""][:3]
    try:
        if folder == "--list":
            print(listing(git(TEMPLATE, "ls-files").splitlines()))
        elif folder:
            print(make_project(Path(folder).expanduser().resolve(), names.split(), script))
        else:
            raise UserError("DIR is missing; write make project DIR=../mine")
    except subprocess.CalledProcessError as error:
        sys.exit(f"make project: git {error.cmd[5]} failed: {' '.join(error.stderr.split())}")
    except (OSError, UserError) as error:
        sys.exit(f"make project: {error}")


def make_project(folder: Path, names: list[str], script: str) -> str:
    """Make the project, or add the template's last commit to its branch `template`.

    Args:
        folder: folder of the project.
        names: names of its parts; empty: those that it had, in a new project all.
        script: `each` or `merged`; empty: as it was, in a new project `each`.

    Returns:
        What was done, and the command that comes next.

    Raises:
        UserError: there can be no such project.
    """
    if changed := git(TEMPLATE, "status", "--porcelain", "--untracked-files=no").splitlines():
        raise UserError(f"{changed[0][3:]} has changes; commit or stash them")
    if folder == TEMPLATE or TEMPLATE in folder.parents:
        raise UserError(f"DIR={folder} is inside the template; use one outside, such as ../mine")
    name = folder.name
    is_new = not folder.exists() or not any(folder.iterdir())
    if not is_new:
        name, had, script_before = last_version(folder)
        names, script = names or had, script or script_before
    if script not in ("", "each", "merged"):
        raise UserError(f"SCRIPT={script} is not possible; use each or merged")
    chosen, merged = with_needs(names), ""
    if script == "merged":
        chosen -= {"compose"}
        merged = merged_script(chosen)

    date = git(TEMPLATE, "log", "-1", "--date=short", "--format=%ad")
    version = f"{git(TEMPLATE, 'describe', '--tags', '--always')} ({date})"  # a release is a tag
    facts = [f"Parts: {' '.join(names)}"] * bool(names) + [f"Script: {script}"] * bool(script)
    with TemporaryDirectory() as temporary:
        files = folder
        if is_new:
            folder.mkdir(parents=True, exist_ok=True)
            git(folder, "init", "--quiet", "--initial-branch=template")
        else:  # beside main and the owner's files, which have no part in this
            files = Path(temporary, "files")
            git(folder, "worktree", "prune")
            git(folder, "worktree", "add", "--no-checkout", str(files), "template")
        write_files(name, chosen, merged, files)
        git(files, "add", "--all", "--force", ".")
        message = "\n".join([MESSAGE + version, "", *facts])
        git(files, "commit", "--quiet", "--allow-empty", "--no-gpg-sign", "-m", message)
    if is_new:
        git(folder, "switch", "--quiet", "--create=main")
        return f"{folder} is a project of its own; there: make setup"
    git(folder, "worktree", "prune")
    return f"{folder}: branch template is now at {version}; there: git merge template"


def last_version(folder: Path) -> tuple[str, list[str], str]:
    """Return the project's name, parts and `SCRIPT`, as they are on its branch `template`."""
    if not (folder / ".git").exists() or not git(folder, "branch", "--list", "template"):
        raise UserError(
            f"DIR={folder} is not empty, and no project with a branch template (in the clone of "
            "one, git branch template origin/template brings it); use another folder"
        )
    subject, names, script = git(folder, "log", "-1", f"--format={FACTS}", "template").split("\n")
    if not subject.startswith(MESSAGE):
        raise UserError(
            f"DIR={folder}: {subject!r} on branch template is not the template's; move it to main"
        )
    first_line, *_ = git(folder, "show", "template:README.md").splitlines()
    return first_line.removeprefix("# "), names.split(), script


def merged_script(chosen: set[str]) -> str:
    """Return `train.py` with the techniques among the parts, whose marks are ordinary comments."""
    techniques = sorted(chosen & find_techniques().keys())
    if not techniques:
        raise UserError("SCRIPT=merged: there is no technique among PARTS, such as ddp or amp")
    script = compose(techniques, output=BASELINE).replace(MARKER, "# ")
    return re.sub(r"^Written by .*\n", "", script, count=1, flags=re.MULTILINE)


def write_files(name: str, chosen: set[str], merged: str, folder: Path) -> None:
    """Write the files of a project: copies of the template's, and those that are made for it.

    Args:
        name: of the project.
        chosen: its parts.
        merged: its only training script; empty: it has one for each technique.
        folder: folder without other files.
    """
    tracked = git(TEMPLATE, "ls-files").splitlines()
    kept = files_of(chosen, tracked)
    if merged:
        kept = [file for file in kept if not re.fullmatch(r"train_\w+\.py", file)]
    git(TEMPLATE, "checkout-index", f"--prefix={folder}/", "--", *kept)
    if merged:
        (folder / BASELINE).write_text(merged)
    readme = readme_of(name, chosen, merged, set(tracked) - set(kept))
    (folder / "README.md").write_text(readme)

    package = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "project"
    unused = unused_packages(chosen)
    text = (folder / "pyproject.toml").read_text().replace(f'"{NAME}"', f'"{package}"')
    text = re.sub(r'^description = .*\n|, "(benchmarks|template)[^"]*"', "", text, flags=re.M)
    lines = text.splitlines(True)
    lines = [line for line in lines if not packages_in(line) or packages_in(line) - unused]
    (folder / "pyproject.toml").write_text("".join(lines))
    pins = without_pins(unused, (folder / "requirements.txt").read_text())
    (folder / "requirements.txt").write_text(pins.replace(NAME, package))


def readme_of(name: str, chosen: set[str], merged: str, gone: set[str]) -> str:
    """Return a project's README: template/README.md without the lines that name a file that is
    gone, with its parts and, if scripts are merged, the command that starts theirs."""
    lines = (TEMPLATE / "template" / "README.md").read_text().replace("NAME", name, 1).split("\n")
    page = "\n".join(x for x in lines if not gone.intersection(re.findall(r"[\w./]+", x)))
    start = ""
    if merged:
        command = re.findall(r"Start with `(.*?)`", merged)[0]
        page = page.replace("python train.py", command)
        scripts = [f"`train_{name}.py`" for name in sorted(chosen & find_techniques().keys())]
        start = (
            f"`train.py` is the merge of {' and '.join(scripts)}, which pages name; where they say "
            f"`python train.py`, write `{command}`.\n\n"
        )
    rows = [
        f"| {part} | {PARTS[part]} | {', '.join(f'`{x}`' for x in paths if x not in gone)} |"
        for part, paths in TABLE["files"].items()
        if part in chosen
    ]
    return page.replace("START\n\n", start).replace("PARTS", "\n".join(rows or ["| none | | |"]))


def packages_in(line: str) -> set[str]:
    """Return the packages that a line of pyproject.toml asks for."""
    return set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', line))


def without_pins(unused: set[str], requirements: str) -> str:
    """Return pinned requirements without unused packages and what they alone need; below each pin
    is `via`, the names of those that need it."""
    pins = re.findall(r"^\S.*\n(?: .*\n)*", requirements, re.MULTILINE)
    removed: set[str] = set()
    for _ in pins:  # what a removed one needs may be removed in the next round
        for pin in pins:
            name = pin.partition("==")[0]
            users = set(re.findall(r"(?:via|#  ) (\S+)", pin))
            if users and not users - removed - ({NAME} if name in unused else set()):
                removed.add(name)
    kept = "".join(pin for pin in pins if pin.partition("==")[0] not in removed)
    return "".join(x for x in kept.splitlines(True) if x.strip(" #\n") not in removed)


def git(folder: Path, *arguments: str) -> str:
    """Run git and return what it prints, without the last line's end; CalledProcessError with its
    words if it fails."""
    env = {key: value for key, value in os.environ.items() if key not in OF_A_HOOK}
    for role in ("AUTHOR", "COMMITTER"):  # of commits that nobody writes
        env |= {f"GIT_{role}_NAME": "template", f"GIT_{role}_EMAIL": "template@localhost"}
    command = ["git", "-C", str(folder), "-c", "core.hooksPath=/dev/null", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, env=env, text=True)
    return done.stdout.removesuffix("\n")


if __name__ == "__main__":
    main()
