"""Make or update a project from the template: `make project DIR=../mine PARTS="ddp amp"`.

The project has a history of its own with two branches: `template`, which holds what this script
writes and nothing else, and `main`, which starts there. Run again, the script adds a commit to
`template`; `main` and the project's files do not change until its owner says `git merge template`.

`PARTS` names the parts besides the core (`make parts` lists them; `core` for none; default: those
that it had, all in a new project). `SCRIPT=merged` makes one `train.py` of its techniques,
`SCRIPT=each` (the default in a new project) a script for each. The messages of the commits on
`template` hold both.
"""

import fnmatch
import re
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.errors import UserError, unknown_name
from tools.compose import BASELINE, MARKER, compose, find_techniques, git

TEMPLATE = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((TEMPLATE / "template" / "parts.toml").read_text())
PARTS: dict[str, str] = TABLE["about"]
"""What each part is, by its name."""
NAME = "distributed-training-template"
AUTHOR = ["-c", "user.name=template", "-c", "user.email=template@localhost"]
COMMIT = [*AUTHOR, "-c", "core.hooksPath=/dev/null", "commit", "--quiet", "--no-gpg-sign"]
MESSAGE = re.compile(r"Template at .*\n\nProject: (.*)\nParts: ?(.*)\nScript: ?(.*)")


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
    except (OSError, UserError) as error:
        sys.exit(f"make project: {error}")


def make_project(folder: Path, names: list[str], script: str) -> str:
    """Make the project, or add the template's last commit to its branch `template`.

    Empty `names` and `script` are as they were; in a new project all parts, and `each`. Returns
    what was done, and the command that comes next.
    """
    if changed := git(TEMPLATE, "status", "--porcelain", "--untracked-files=no").splitlines():
        raise UserError(f"{changed[0][3:]} has changes; commit or stash them")
    if folder == TEMPLATE or TEMPLATE in folder.parents:
        raise UserError(f"DIR={folder} is inside the template; use one outside, such as ../mine")
    name = folder.name
    is_new = not folder.exists() or not any(folder.iterdir())
    if not is_new:
        name, parts_before, script_before = last_version(folder)
        names, script = names or parts_before.split(), script or script_before
    if script not in ("", "each", "merged"):
        raise UserError(f"SCRIPT={script} is not possible; use each or merged")
    parts = with_needs(names) - ({"compose"} if script == "merged" else set())
    own = own_texts(name, parts, script)

    date = git(TEMPLATE, "log", "-1", "--date=short", "--format=%ad")
    version = f"{git(TEMPLATE, 'describe', '--tags', '--always')} ({date})"  # a release is a tag
    message = (
        f"Template at {version}\n\nProject: {name}\nParts: {' '.join(names)}\nScript: {script}"
    )
    with TemporaryDirectory() as temporary:
        files = folder
        if is_new:
            folder.mkdir(parents=True, exist_ok=True)
            git(folder, "init", "--quiet", "--initial-branch=template")
        else:  # beside main and the owner's files, which have no part in this
            files = Path(temporary, "files")
            git(folder, "worktree", "prune")
            git(folder, "worktree", "add", "--no-checkout", str(files), "template")
        copied = files_of(parts, git(TEMPLATE, "ls-files").splitlines())
        if script == "merged":
            copied = [file for file in copied if not file.startswith("train_")]
        git(TEMPLATE, "checkout-index", f"--prefix={files}/", "--", *copied)
        for file, text in own.items():
            (files / file).write_text(text)
        git(files, "add", "--all", "--force", ".")
        git(files, *COMMIT, "--allow-empty", "-m", message)
    if is_new:
        git(folder, "switch", "--quiet", "--create=main")
        return f"{folder} is a project of its own; there: make setup"
    git(folder, "worktree", "prune")
    return f"{folder}: branch template is now at {version}; there: git merge template"


def last_version(folder: Path) -> tuple[str, ...]:
    """Return the project's name, parts and `SCRIPT`, as they are on its branch `template`."""
    if not (folder / ".git").exists() or not git(folder, "branch", "--list", "template"):
        raise UserError(
            f"DIR={folder} is not empty, and no project with a branch template (in the clone of "
            "one, git branch template origin/template brings it); use another folder"
        )
    message = git(folder, "log", "-1", "--format=%B", "template").strip()
    if not (found := MESSAGE.fullmatch(message)):
        subject = message.partition("\n")[0]
        raise UserError(
            f"DIR={folder}: {subject!r} on branch template is not the template's; move it to main"
        )
    return found.groups()


def with_needs(names: list[str]) -> set[str]:
    """Return parts with all that they need; no name stands for all parts, `core` for none."""
    for name in names:
        if name not in (*PARTS, "core"):
            raise unknown_name("PARTS", name, [*PARTS, "core"])
    needs = TABLE["needs"]
    return {part for name in names or PARTS for part in (name, *needs.get(name, []))} - {"core"}


def files_of(chosen: set[str], tracked: list[str]) -> list[str]:
    """Return those of the template's files that a project with these parts has."""
    owners = [(path, {name}) for name, paths in TABLE["files"].items() for path in paths]
    owners += [(path, set(names)) for path, names in TABLE["with"].items()]

    def is_there(file: str) -> bool:
        around = [file, *map(str, Path(file).parents)]
        return all(names <= chosen for path, names in owners if fnmatch.filter(around, path))

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


def own_texts(name: str, parts: set[str], script: str) -> dict[str, str]:
    """Return the texts of files that are no copies: with the project's name, or merged."""
    package = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "project"
    texts = {"README.md": (TEMPLATE / "template/README.md").read_text().replace("NAME", name, 1)}
    for file in ("pyproject.toml", "requirements.txt"):
        texts[file] = (TEMPLATE / file).read_text().replace(NAME, package)
    if script == "merged":
        techniques = sorted(parts & find_techniques().keys())
        if not techniques:
            raise UserError("SCRIPT=merged: there is no technique among PARTS, such as ddp or amp")
        # Its marks become ordinary comments.
        texts[BASELINE] = compose(techniques, output=BASELINE).replace(MARKER, "# ")
    return texts


if __name__ == "__main__":
    main()
