"""Imports go down the layers and through doors, and no module acts because it was imported."""

import ast
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils.data import Dataset

from tests.helpers import REPOSITORY
from tests.images import loaders_of, make_photos, photos_in

# Hydra reads registries before it calls a main function; data.max_pixels replaces Pillow's limit.
MAY_ACT = {"conf.schema", "loaders.images.headers"}
MEASURES_IT = "benchmarks.loop_overhead"
"""The training loop of train.py."""
KNOW_RANKS = tuple(f"runtime.{name}" for name in ("distributed", "process_group", "fsdp", "shards"))
USE = re.compile(r"\btorch\.distributed\b(?!\.run)|from torch import .*\bdistributed\b")
INSIDE = re.compile(r"(?:loaders|runtime)\.\w+\.\w+")


def layers() -> list[str]:
    """From the ground up; `models/`, `tasks/` and `runtime/` count as one with their folders."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    table = text.partition("\n## Folders\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `(.+?)/?`", table, re.MULTILINE)
    layers = [name.removesuffix(".py").replace("/", ".") for name in names]
    return [name for name in layers if not name.startswith(("runtime.", "models.", "tasks."))]


def read_modules() -> dict[str, ast.Module]:
    """Files that git tracks or would track, by the name of their module."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.check_output(command, cwd=REPOSITORY, text=True).splitlines()
    modules = {}
    for path in map(REPOSITORY.joinpath, listed):
        if path.is_file():
            name = str(path.relative_to(REPOSITORY)).removesuffix(".py").removesuffix("/__init__")
            modules[name.replace("/", ".")] = ast.parse(path.read_text())
    return modules


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


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """Append the files whose functions run, also in threads that start here, to a file."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        found.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        with path.open("a") as file:
            file.writelines(f"{name}\n" for name in found)


@dataclass
class Noted(Dataset[Any]):
    """A Dataset that notes what runs in it, in a worker process, too."""

    dataset: Any
    path: Path

    def __getitems__(self, rows: Any) -> Any:
        with noted(self.path):
            return self.dataset.__getitems__(rows)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_page_on_loaders_shows_the_files_that_a_batch_passes(workers: int, tmp_path) -> None:
    """Besides those, only types of data and threads."""
    photos = photos_in(make_photos(tmp_path / "photos", 40), "data.colour_jitter=[0.4,0,0]")
    options = ["data.random_crop=true", "data.hflip=0.5", f"loader.num_workers={workers}"]
    loader: Any = loaders_of(*photos, *options, "data.resize=50", "loader.num_threads=1")[0]
    batches, path = loader.batches, tmp_path / "files.txt"
    if workers:
        vars(batches)["dataset"] = Noted(batches.dataset, path)
    with noted(path):
        next(iter(loader))
    passed = {*re.findall(rf"^{REPOSITORY}/loaders/(augment/|.*)", path.read_text(), re.MULTILINE)}
    page = (REPOSITORY / "docs" / "loaders.md").read_text()
    [picture] = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    shown = {*re.findall(r"(?:\w+/)+(?:\w+\.py)?|(?<!/)\b\w+\.py", picture)}
    assert shown - passed <= {"workers.py", "backends/dali.py", "shards/source.py"}
    assert passed - shown <= {"index.py", "batch.py", "columns.py", "targets.py", "limits.py"}
