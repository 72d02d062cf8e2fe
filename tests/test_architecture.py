"""Imports go down the layers and through doors, and no module acts because it was imported."""

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import TopologicalSorter

from tests.helpers import REPOSITORY

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text()
# Hydra reads registries before it calls a main function; data.max_pixels replaces Pillow's limit.
MAY_ACT = {"conf.schema", "loaders.images.headers"}
MEASURES_IT = "benchmarks.loop_overhead"
"""The training loop of train.py."""
KNOW_RANKS = ("runtime.distributed", "runtime.process_group", "runtime.fsdp")
USE = re.compile(r"\btorch\.distributed\b(?!\.run)|from torch import .*\bdistributed\b")
INSIDE = re.compile(r"(?:loaders|runtime)\.\w+\.\w+")


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = re.split(r"^#+ ", text.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.partition(" <!--")[0].strip("| ").split(" | ") for line in lines[2:]]


def layers() -> list[str]:
    """From the ground up; `models/`, `tasks/` and `runtime/` count as one with their folders."""
    folders = [row[0].strip("`/").removesuffix(".py") for row in rows_of(ARCHITECTURE, "Folders")]
    names = [folder.replace("/", ".") for folder in folders]
    return [name for name in names if not name.startswith(("runtime.", "models.", "tasks."))]


def read_modules() -> dict[str, ast.Module]:
    """Files that git tracks or would track, by the name of their module."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.check_output(command, cwd=REPOSITORY, text=True).splitlines()
    paths = {name: REPOSITORY / name for name in listed if (REPOSITORY / name).is_file()}
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ast.parse(
            path.read_text()
        )
        for name, path in paths.items()
    }


LAYERS = layers()
MODULES = read_modules()
CODE = [name for name in MODULES if "tests" not in name.split(".")]


def imports_of(module: str) -> set[str]:
    """Modules that this one imports, also inside functions."""
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{name.name}" for name in node.names]
            found |= {name if name in MODULES else node.module for name in names}
    return found


def layer_of(module: str) -> str:
    """The layer of a module; empty for scripts and for folders of the project's own."""
    found = [layer for layer in LAYERS if f"{module}.".startswith(f"{layer}.")]
    return max(found, key=len, default="")


def test_a_folder_imports_only_from_rows_above_its_own() -> None:
    assert {"conf", "models", "runtime"} <= set(LAYERS)
    for module in CODE:
        if layer := layer_of(module):
            above = ["conf"] if layer == "models" else LAYERS[: LAYERS.index(layer)]
            above += ["loaders"] * layer.startswith("loaders.")  # its commands
            assert {*map(layer_of, imports_of(module))} <= {layer, "", *above}, module


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({name: imports_of(name) for name in MODULES}).prepare()  # names a circle


def test_code_imports_no_script_and_of_a_folder_around_others_only_its_door() -> None:
    scripts = {name for name in MODULES if (REPOSITORY / f"{name}.py").exists()}
    for module in CODE:
        imports = imports_of(module)
        assert module == MEASURES_IT or not imports & scripts, module
        for imported in filter(INSIDE.fullmatch, imports & MODULES.keys()):
            assert f"{module}.".startswith(f"{imported.rpartition('.')[0]}."), (module, imported)


def run_by_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported, below a node."""
    for inner in ast.iter_child_nodes(node):
        is_main = isinstance(inner, ast.If) and ast.unparse(inner.test).startswith("__name__ ==")
        if not is_main and not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner
            yield from run_by_import(inner)


def test_no_module_acts_because_it_is_imported() -> None:
    """It calls nothing for its effect and sets no attribute, such as one of another module."""
    for module in set(CODE) - MAY_ACT:
        for node in run_by_import(MODULES[module]):
            calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            sets = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            assert (calls, sets) == (False, False), f"{module}: {ast.unparse(node)}"


def test_only_its_folders_and_scripts_know_torch_distributed() -> None:
    """Everything else exchanges values through the group that a script passes on."""
    for module in filter(layer_of, CODE):
        is_used = USE.search(ast.unparse(MODULES[module]))
        assert not is_used or module.startswith(KNOW_RANKS), module
