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
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.errors import UserError, unknown_name
from tools.compose import BASELINE, MARKER, compose, find_techniques

TEMPLATE = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((TEMPLATE / "template" / "parts.toml").read_text())
PARTS: dict[str, str] = TABLE["about"]
"""What each part is, by its name."""
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
    chosen = with_needs(names)
    merged = ""
    if script == "merged":
        chosen -= {"compose"}
        merged = merged_script(chosen)

    date = git(TEMPLATE, "log", "-1", "--date=short", "--format=%ad")
    version = f"{git(TEMPLATE, 'describe', '--tags', '--always')} ({date})"  # a release is a tag
    message = f"{MESSAGE}{version}\n\nParts: {' '.join(names)}\nScript: {script}"
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


def with_needs(names: list[str]) -> set[str]:
    """Return parts with all that they need; no name stands for all parts, `core` for none."""
    waiting, chosen = [*(names or PARTS)], set()
    while waiting:
        name = waiting.pop()
        if name not in (*PARTS, "core"):
            raise unknown_name("PARTS", name, [*PARTS, "core"])
        chosen.add(name)
        waiting += TABLE["needs"].get(name, [])
    return chosen - {"core"}


def files_of(chosen: set[str], tracked: list[str]) -> list[str]:
    """Return those of the template's files that a project with these parts has."""
    owners = {path: {name} for name, paths in TABLE["files"].items() for path in paths}
    owners |= {path: set(names) for path, names in TABLE["with"].items()}

    def is_there(file: str) -> bool:
        around = [file, *map(str, Path(file).parents)]
        return all(owners[path] <= chosen for path in around if path in owners)

    return [file for file in tracked if is_there(file)]


def listing(tracked: list[str]) -> str:
    """List the core and the parts: what each is, and the lines of code that it adds to the core."""
    product = [file for file in tracked if not file.startswith("tests/")]
    code = [file for file in product if file.endswith((".py", ".yaml", ".sbatch"))]

    def size(*names: str) -> int:
        files = files_of(with_needs([*names, "core"]), code)
        return sum(len((TEMPLATE / file).read_text().splitlines()) for file in files)

    lines = [f"{'core':12}{size():7,}  lines that every project has; all parts: {size(*PARTS):,}"]
    for name, about in PARTS.items():
        needs = TABLE["needs"].get(name, [])
        more = f" (with {' and '.join(needs)})" if needs else ""
        lines.append(f"{name:12}{size(name) - size():+7,}  {about}{more}")
    return "\n".join(lines)


def merged_script(chosen: set[str]) -> str:
    """Return `train.py` with the techniques among the parts, whose marks are ordinary comments."""
    techniques = sorted(chosen & find_techniques().keys())
    if not techniques:
        raise UserError("SCRIPT=merged: there is no technique among PARTS, such as ddp or amp")
    return compose(techniques, output=BASELINE).replace(MARKER, "# ")


def write_files(name: str, chosen: set[str], merged: str, folder: Path) -> None:
    """Write the files of a project: copies of the template's, and those that bear its name.

    Args:
        name: of the project.
        chosen: its parts.
        merged: its only training script; empty: it has one for each technique.
        folder: folder without other files.
    """
    kept = files_of(chosen, git(TEMPLATE, "ls-files").splitlines())
    if merged:
        kept = [file for file in kept if not file.startswith("train_")]
    git(TEMPLATE, "checkout-index", f"--prefix={folder}/", "--", *kept)
    if merged:
        (folder / BASELINE).write_text(merged)
    page = (TEMPLATE / "template" / "README.md").read_text()
    (folder / "README.md").write_text(page.replace("NAME", name, 1))
    package = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "project"
    for file in ("pyproject.toml", "requirements.txt"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace(NAME, package))


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
