"""The parts of a project, as `template/parts.toml` lists them: which files and packages it has."""

import tomllib
from pathlib import Path

from conf.errors import unknown_name

TEMPLATE = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((TEMPLATE / "template" / "parts.toml").read_text())
PARTS: dict[str, str] = TABLE["about"]
"""What each part is, by its name."""


def with_needs(names: list[str]) -> set[str]:
    """Return parts with all that they need; no name stands for all parts, `core` for none.

    Raises:
        UserError: there is no part of a name.
    """
    waiting, chosen = [*(names or PARTS)], {"core"}
    while waiting:
        name = waiting.pop()
        if name not in (*PARTS, "core"):
            raise unknown_name("PARTS", name, [*PARTS, "core"])
        if name not in chosen:
            chosen.add(name)
            waiting += TABLE["needs"].get(name, [])
    return chosen - {"core"}


def files_of(chosen: set[str], tracked: list[str]) -> list[str]:
    """Return those of the template's files that a project with these parts has."""
    owners: dict[str, set[str]] = {}
    for name, paths in TABLE["files"].items():
        for path in paths:
            owners.setdefault(path, set()).add(name)

    def is_there(file: str) -> bool:
        around = [str(path) for path in (Path(file), *Path(file).parents)]
        is_owned = all(chosen & owners[path] for path in around if path in owners)
        return is_owned and chosen.issuperset(TABLE["with"].get(file, []))

    return [file for file in tracked if is_there(file)]


def unused_packages(chosen: set[str]) -> set[str]:
    """Return the packages that only parts use that are not chosen."""
    packages = {name: set(each) for name, each in TABLE["packages"].items()}
    used = [each for name, each in packages.items() if name in chosen]
    return set().union(*packages.values()).difference(*used)


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
