"""Imports go down the layers and through doors, and no module acts because it was imported."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.helpers import REPOSITORY, SCRIPTS

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()
# Hydra reads registries before it calls a main function; data.max_pixels replaces Pillow's limit.
MAY_ACT = {"conf.schema", "loaders.images.headers"}
MEASURES_IT = "benchmarks.loop_overhead"
"""The training loop of train.py."""
USE = re.compile(r"\btorch\.distributed\b(?!\.run)|from torch import (\([^)]*|.*)\bdistributed\b")


def path_of(cell: str) -> str:
    """A folder, or a file without its ending, in a cell of a table."""
    return cell.strip("`/").removesuffix(".py")


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = re.split(r"^#+ ", text.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.partition(" <!--")[0].strip("| ").split(" | ") for line in lines[2:]]


def doors() -> dict[str, str]:
    """The door of each folder, from the ground up; a page of a part says below which its own
    are."""
    rows = rows_of(ARCHITECTURE, "Folders")
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        for *row, above in rows_of(page.read_text(), "Folders") * (page.stem != "architecture"):
            rows.insert([folder for folder, *_ in rows].index(above) + 1, row)
    return {path_of(folder): door for folder, _, door in rows}


FOLDERS_OF_PARTS = doors().keys() - {path_of(row[0]) for row in rows_of(ARCHITECTURE, "Folders")}
LAYERS = [folder.replace("/", ".") for folder in doors()]
LAYERS = [layer for layer in LAYERS if not layer.startswith(("runtime.", "models.", "tasks."))]
"""From the ground up; `models/`, `tasks/` and `runtime/` count as one with their folders."""


@cache
def modules() -> dict[str, Path]:
    """Files that git tracks or would track, by the name of their module."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    paths = [Path(name) for name in done.stdout.splitlines() if (REPOSITORY / name).is_file()]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths, strict=True))


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


def layer_of(module: str) -> str:
    """The layer of a module; empty for scripts and for folders of the project's own."""
    layers = [layer for layer in LAYERS if f"{module}.".startswith(f"{layer}.")]
    return max(layers, key=len, default="")


def test_a_folder_imports_only_from_rows_above_its_own() -> None:
    assert {"conf", "models", "runtime"} <= set(LAYERS)
    for module in code():
        if layer := layer_of(module):
            above = ["conf"] if layer == "models" else LAYERS[: LAYERS.index(layer)]
            above += ["loaders"] * layer.startswith("loaders.")  # its commands
            assert {*map(layer_of, imports_of(module))} <= {layer, "", *above}, module


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({name: imports_of(name) for name in modules()}).prepare()  # names a circle


def test_nobody_imports_an_entry_point_and_what_is_outside_a_folder_its_door_only() -> None:
    inner = re.compile(r"(?:loaders|runtime|tests)\.\w+\.\w+")
    for module in modules():
        for imported in imports_of(module):
            is_code = module in code() and module != MEASURES_IT
            assert not (is_code and imported.startswith("train")), module
            is_script = modules()[imported].parent == Path(".")
            assert not (is_code and layer_of(module) and is_script), f"{module}: {imported}"
            folder = imported.rpartition(".")[0]
            is_inside = f"{module}.".startswith(f"{folder}.")
            assert is_inside or not inner.fullmatch(imported), f"{module} imports {imported}"


def run_by_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported, below a node."""
    for inner in ast.iter_child_nodes(node):
        is_main = isinstance(inner, ast.If) and ast.unparse(inner.test).startswith("__name__ ==")
        if not is_main and not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner
            yield from run_by_import(inner)


def test_no_module_acts_because_it_is_imported() -> None:
    """It calls nothing for its effect and sets no attribute, such as one of another module."""
    for module in set(code()) - MAY_ACT:
        for node in run_by_import(tree_of(module)):
            calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            sets = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            assert (calls, sets) == (False, False), f"{module}: {ast.unparse(node)}"


def test_only_their_folders_and_scripts_with_ranks_know_torch_distributed() -> None:
    """Everything else exchanges values through the group that a script passes on."""
    for name in [name for name in code() if USE.search(text_of(name))]:
        if layer_of(name):
            assert name.startswith(("runtime.distributed", "runtime.process_group", "runtime.fsdp"))
        elif name.startswith("train"):
            assert "init_process_group" in text_of(name)


def loaded_by(module: str) -> set[str]:
    """Names of this repository's modules that Python has loaded after an import."""
    program = f"import {module}, json, sys; print(json.dumps([*sys.modules]))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return modules().keys() & set(json.loads(done.stdout))


def test_a_script_loads_only_what_it_uses() -> None:
    """One process needs nothing of several, and a technique on one GPU is a few files."""
    baseline = loaded_by("train")
    assert "runtime.profile" not in baseline
    for script in SCRIPTS:
        name = script.removesuffix(".py")
        if "init_process_group" not in text_of(name):
            own = loaded_by(name) - baseline
            assert not any(name.startswith("runtime.distributed") for name in own), script
            assert sum(len(text_of(name).splitlines()) for name in own) < 300, own
