"""Imports go down the layers and through doors, and no module acts because it was imported."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

from tests.helpers import REPOSITORY, has_ranks

# The parts from the ground up, and what each may import besides itself.
GROUND = ("loaders.limits", "loaders.memory", "loaders.storage", "loaders.images")
COMMON = ("loaders.batch", "loaders.targets", "loaders.loader")
FOR_ALL = ("loaders.limits", *COMMON, "loaders.epoch")
ABOVE = ("index", "read", "class_counts", "augment", "plan", "shards", "backends")
MAY_IMPORT: dict[str, set[str]] = {
    "conf": set(),
    **{part: {"conf", "loaders.limits"} for part in GROUND},
    **{part: {"conf", *COMMON[:number]} for number, part in enumerate(COMMON)},
    "loaders.epoch": {"conf", "loaders.limits", *COMMON},
    **{
        f"loaders.{part}": {
            *("conf", *GROUND, *FOR_ALL, *(f"loaders.{lower}" for lower in ABOVE[:number]))
        }
        for number, part in enumerate(ABOVE)
    },
    "loaders.own": {"conf", *FOR_ALL},
    "loaders": {"conf", *GROUND, *FOR_ALL, *(f"loaders.{part}" for part in ABOVE)},
    "models": {"conf"},
    "tasks": {"conf", "loaders", *COMMON},
    "runtime": {"conf", "loaders", *COMMON, "models", "tasks"},
}
# Hydra reads registries before it calls a main function; data.max_pixels replaces Pillow's limit.
MAY_ACT = {"conf.schema", "loaders.images.decoders"}
MEASURES_IT = "benchmarks.loop_overhead imports train"
PRIVATE = re.compile(r"(?<!\w)_(?!_)\w+")
USE = re.compile(r"\btorch\.distributed\b(?!\.run)|from torch import (\([^)]*|.*)\bdistributed\b")
# Names with an underscore that are documented.
PUBLIC = {"_exit", "_replace", "_asdict", "_fields"}


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    """Files that git tracks or would track, by the name of their module."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    paths = [Path(name) for name in done.stdout.splitlines() if (REPOSITORY / name).is_file()]
    return {module_of(path): path for path in paths}


def text_of(module: str) -> str:
    return (REPOSITORY / modules()[module]).read_text()


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(text_of(module))


@cache
def offered_by(module: str) -> set[str]:
    """Names that a module imports for others, such as a function whose file has the same name."""
    if module not in modules():  # a folder of scripts
        return set()
    froms = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.ImportFrom)]
    inner = [node for node in froms if f"{node.module}.".startswith(f"{module}.")]
    return {name.asname or name.name for node in inner for name in node.names}


@cache
def imports_of(module: str) -> set[str]:
    """Modules of the repository that this one imports, also inside functions."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                is_module = inner in modules() and name.name not in offered_by(node.module)
                found.add(inner if is_module else node.module)
    return found & modules().keys()


def code() -> list[str]:
    """Modules besides the tests."""
    return [name for name in modules() if "tests" not in name.split(".")]


def part_of(module: str) -> str:
    """The part that holds a module; empty for scripts and for folders of the project's own."""
    parts = [part for part in MAY_IMPORT if f"{module}.".startswith(f"{part}.")]
    return max(parts, key=len, default="")


def test_a_part_imports_only_what_lies_below_it() -> None:
    up = [
        f"{module} imports {imported}"
        for module in code()
        for imported in imports_of(module)
        if part_of(module)
        and part_of(imported) not in MAY_IMPORT[part_of(module)] | {part_of(module), ""}
    ]
    assert not up, "\n".join(sorted(up))


def test_no_module_imports_itself_by_way_of_others() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in sorted(imports_of(module)):
                visit(imported, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


def test_nobody_imports_an_entry_point_and_no_part_a_script() -> None:
    found = {
        f"{module} imports {imported}"
        for module in code()
        for imported in imports_of(module)
        if imported.startswith("train")
        or (part_of(module) and modules()[imported].parent == Path("."))
    }
    assert found <= {MEASURES_IT}, "\n".join(sorted(found))


def test_what_is_outside_a_folder_imports_its_door_only() -> None:
    past = []
    for module in modules():
        for imported in imports_of(module):
            folder = imported.rpartition(".")[0]
            starts = ("loaders.", "runtime.", "tests.")
            is_inner = folder.count(".") == 1 and folder.startswith(starts)
            if is_inner and not f"{module}.".startswith(f"{folder}."):
                past.append(f"{module} imports {imported}")
    assert not past, "\n".join(sorted(past))


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that run when a module is imported."""
    found = []
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ =="):
            continue
        found.append(node)
        for inner in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found += statements(getattr(node, inner, []))
    return found


def test_no_module_acts_because_it_is_imported() -> None:
    """It calls nothing for its effect and sets nothing in a module that it has imported."""
    acting = []
    for module in set(code()) - MAY_ACT:
        tree = tree_of(module)
        imported = {
            (name.asname or name.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        }
        for node in statements(tree.body):
            does = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            for target in node.targets if isinstance(node, ast.Assign) else []:
                name = ast.unparse(target)
                does |= not name.isidentifier() and re.split(r"\W", name)[0] in imported
            if does:
                acting.append(f"{modules()[module]}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not acting, "\n".join(acting)


def test_ctypes_is_used_in_one_file() -> None:
    found = [name for name in code() if re.search(r"^ *import ctypes", text_of(name), re.MULTILINE)]
    assert len(found) <= 1, found


def test_private_names_of_other_modules_are_used_in_one_file() -> None:
    found: dict[str, list[str]] = {}
    for module in code():
        for node in ast.walk(tree_of(module)):
            names = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
                names = [node.attr]
            if any(part not in PUBLIC for name in names for part in PRIVATE.findall(name)):
                found.setdefault(module, []).append(ast.unparse(node))
    assert len(found) <= 1, "\n".join(f"{name}: {'; '.join(uses)}" for name, uses in found.items())


def test_only_one_folder_and_scripts_with_ranks_know_torch_distributed() -> None:
    """Everything else exchanges values through the group that a script passes on."""
    users = {name for name in code() if part_of(name) and USE.search(text_of(name))}
    assert all(name.startswith("runtime.distributed") for name in users), users
    scripts = [name for name in code() if name.startswith("train")]
    assert all(USE.search(text_of(name)) is None or has_ranks(f"{name}.py") for name in scripts)
