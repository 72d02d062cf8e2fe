"""Imports go down the layers and through doors, and no module acts because it was imported."""

import ast
import inspect
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
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
KNOW_RANKS = tuple(f"runtime.{name}" for name in ("distributed", "process_group", "fsdp", "resume"))
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


def test_imports_go_up_the_table_and_through_doors() -> None:
    """No module imports a script, nor more than the door of a folder around others; only some know
    torch.distributed: the others exchange values through the group that a script passes on."""
    assert {"conf", "models", "runtime"} <= set(LAYERS)
    scripts = {name for name in MODULES if (REPOSITORY / f"{name}.py").exists()}
    for module in CODE:
        imports = imports_of(module)
        assert module == MEASURES_IT or not imports & scripts, module
        for imported in filter(INSIDE.fullmatch, imports & MODULES.keys()):
            assert f"{module}.".startswith(f"{imported.rpartition('.')[0]}."), (module, imported)
        if layer := layer_of(module):
            above = ["conf"] if layer == "models" else LAYERS[: LAYERS.index(layer)]
            above += ["loaders"] * layer.startswith("loaders.")  # its commands
            assert {*map(layer_of, imports)} <= {layer, "", *above}, module
            is_used = USE.search(ast.unparse(MODULES[module]))
            assert not is_used or module.startswith(KNOW_RANKS), module


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({name: imports_of(name) for name in MODULES}).prepare()  # names a circle


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


def note_calls(path: Path) -> None:
    """Write file and name of each function in loaders/ that is called from now on in this process,
    of a generator when it yields."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    start = f"{REPOSITORY}/loaders/"

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_generator = bool(code.co_flags & inspect.CO_GENERATOR)
        is_step = event == "return" and argument is not None if is_generator else event == "call"
        if is_step and code.co_filename.startswith(start):
            os.write(file, f"{code.co_filename.removeprefix(start)} {code.co_qualname}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


@dataclass
class Noted(Dataset[Any]):
    """A Dataset that notes what is called for it in a worker process."""

    dataset: Any
    path: Path

    def __getitems__(self, rows: Any) -> Any:
        if threading.getprofile() is None:
            note_calls(self.path)
        return self.dataset.__getitems__(rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_passes_the_files_and_functions_that_the_page_shows(workers, tmp_path) -> None:
    """Once each; besides them, there are types of data, threads, random numbers, augmentations and
    decoders.
    Four batches of eight are planned at once."""
    photos = photos_in(make_photos(tmp_path / "photos", 40), "data.colour_jitter=[0.4,0,0]")
    options = ["data.random_crop=true", "data.hflip=0.5", f"loader.num_workers={workers}"]
    options += ["data.resize=50", "data.val_count=8", "global_batch_size=8"]
    loader: Any = loaders_of(*photos, *options)[0]
    batches, path = loader.batches, tmp_path / "calls.txt"
    if workers:
        vars(batches)["dataset"] = Noted(batches.dataset, path)
    note_calls(path)
    try:
        assert len(list(loader)) == 4
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    calls = Counter(path.read_text().splitlines())
    page = (REPOSITORY / "docs" / "loaders.md").read_text()
    shown = re.findall(r"^([\w/]+\.py) +([\w.]+) +(an epoch|a batch|an image) ", page, re.MULTILINE)
    assert len(shown) == 8
    expected = {"an epoch": 1, "a batch": 4, "an image": 32}
    for file, function, each in shown:
        assert calls[f"{file} {function}"] == expected[each], function
    passed = {call.partition(" ")[0] for call in calls} - {file for file, _, _ in shown}
    helpers = {"order.py", "batch.py", "columns.py", "targets.py", "limits.py"}
    assert {file for file in passed if not file.startswith("augment/")} <= helpers
