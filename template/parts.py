"""The parts of a project: what each one is, and which files of the template a project has."""

import re
import sys
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

TEMPLATE = Path(__file__).resolve().parents[1]
PARTS: dict[str, Any] = tomllib.loads((TEMPLATE / "template" / "parts.toml").read_text())
TOGETHER: dict[str, list[str]] = PARTS.pop("with")
NOW = {earlier: name for name, those in PARTS.pop("earlier").items() for earlier in those}
"""Names of parts of earlier versions, and of those that have their files now."""
# What measures, shows or makes the template, and the published experiments.
LEFT_OUT = [
    *("template", "benchmarks", "conf/experiment", "GUIDE.md", "CHANGELOG.md", "SCALING.md"),
    *(
        "CITATION.cff",
        "CONTRIBUTING.md",
        ".github/ISSUE_TEMPLATE",
        ".github/workflows/template.yml",
    ),
    *(
        "docs/benchmarks.md",
        "docs/coming_from.md",
        "docs/cost_of_techniques.md",
        "docs/dependencies.md",
        "docs/experiments.md",
    ),
    "tests/parts/template.py",
    *("docs/side_by_side", "docs/side_by_side.svg", "docs/tensorboard.png"),
]


def refuse(message: str) -> NoReturn:
    sys.exit(f"make project: {message}")


def with_needs(names: list[str]) -> set[str]:
    """Return parts with all that they need; no name stands for all parts, `core` for none."""
    waiting, chosen = [NOW.get(name, name) for name in names or PARTS], set[str]()
    while waiting:
        name = waiting.pop()
        if name != "core" and name not in PARTS:
            [nearest] = get_close_matches(name, [*PARTS, "core"], 1, 0) or [""]
            refuse(f"PARTS: there is no part {name}; did you mean {nearest}? make parts lists them")
        if name not in chosen:
            chosen.add(name)
            waiting += PARTS.get(name, {}).get("needs", [])
    return chosen - {"core"}


def files_of(chosen: set[str], tracked: list[str]) -> list[str]:
    """Return those of the template's files that a project with these parts has."""
    owners = {path: {name} for path, name in dict.fromkeys(LEFT_OUT, "template").items()}
    for name, part in PARTS.items():
        for path in part["files"]:
            owners.setdefault(path, set()).add(name)

    def is_there(file: str) -> bool:
        around = [str(path) for path in (Path(file), *Path(file).parents)]
        parts = [owners[path] for path in around if path in owners]
        parts += [set(some.split("|")) for path in around for some in TOGETHER.get(path, [])]
        return all(chosen & some for some in parts)

    return [file for file in tracked if is_there(file)]


def unused_packages(chosen: set[str]) -> set[str]:
    """Return the packages that only parts use that are not chosen."""
    used, unused = set[str](), set[str]()
    for name, part in PARTS.items():
        (used if name in chosen else unused).update(part.get("packages", []))
    return unused - used


def listing(tracked: list[str]) -> str:
    """List the core and the parts: their lines of Python, YAML and batch scripts outside tests/,
    what each part is, and what it needs."""
    counts = {
        file: len((TEMPLATE / file).read_text().splitlines())
        for file in tracked
        if re.fullmatch(r"(?!tests/).*\.(py|yaml|sbatch)", file)
    }

    def size(*names: str) -> int:
        return sum(counts[file] for file in files_of(with_needs([*names, "core"]), list(counts)))

    core = size()
    lines = [
        "Lines of Python, YAML and batch scripts outside tests/. alone: what the part adds to a",
        "project that has what it needs; all: what it adds to the core, with what it needs.",
        "",
        f"core         {core:6,}  what every project has; with all parts: {size(*PARTS):,}",
        "",
        "              alone    all",
    ]
    for name, part in PARTS.items():
        needs = f" (needs {', '.join(part['needs'])})" if "needs" in part else ""
        alone = size(name) - size(*part.get("needs", []))
        lines.append(f"{name:12}{alone:7,}{size(name) - core:7,}  {part['about']}{needs}")
    return "\n".join(lines)


def parts_table(chosen: set[str], gone: set[str]) -> str:
    """Return the rows of the table of a project's parts: name, what it is, and its files."""
    rows = []
    for name, part in PARTS.items():
        if name in chosen:
            files = ", ".join(f"`{path}`" for path in part["files"] if path not in gone)
            rows.append(f"| {name} | {part['about']} | {files} |\n")
    return "".join(rows) or "| none | | |\n"
