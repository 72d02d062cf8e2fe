"""Each part can be left out of a project: nothing that is left needs it or speaks of it."""

import ast
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from template.parts import left_out, read_parts, with_needs
from template.project import LEFT_OUT
from tests.helpers import REPOSITORY
from tests.test_project import clone_template, git, make_project

PARTS, TOGETHER = read_parts()
COMMIT = git(REPOSITORY, "rev-parse", "HEAD").strip()
OF_THIS_COMMIT = random.Random(COMMIT).choice(sorted(PARTS))
SETS = {
    "core": "core",
    "one GPU, classification": "amp torchvision colour mixing runs",
    "two nodes, DDP, AMP and DALI": "ddp amp dali slurm",
    "segmentation": "masks segmentation unet spatial predict",
    "deblurring": "pairs restoration nafnet",
    "a billion samples from a bucket": "ddp amp shards",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return clone_template(tmp_path_factory.mktemp("parts") / "template")


def names_of(module: str, root: Path) -> set[str] | None:
    """Names that a module of a project offers; None if there is no such module."""
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return {inner.stem for inner in path.glob("*.py")} if path.is_dir() else None
    found = {inner.stem for inner in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def unresolved(root: Path) -> list[str]:
    """Imports of modules and names that a project does not have."""
    own = {path.stem for path in root.iterdir() if path.is_dir() or path.suffix == ".py"} | {
        *("benchmarks", "compose", "export", "launch", "predict", "runs", "sweep", "template")
    }
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            imports: list[tuple[str, str]] = []
            if isinstance(node, ast.Import):
                imports = [(name.name, "") for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                imports = [(node.module or "", name.name) for name in node.names]
            for module, name in imports:
                if module.partition(".")[0] not in own:
                    continue
                offered = names_of(module, root)
                if offered is None or (name and name not in offered):
                    found.append(f"{path.relative_to(root)} imports {module} {name}")
    return found


def mentions(root: Path, gone: list[str]) -> list[str]:
    """Places in documents that name files, or choices of the configuration, that a project does not have."""
    choices = [re.fullmatch(r"conf/(\w+)/(\w+)\.yaml", path) for path in gone]
    words = [rf"(?<!\w){c[1]}={c[2]}(?!\w)" for c in choices if c]
    words += [
        rf"(?<![\w/]){re.escape(path)}" for path in gone if path.endswith((".py", ".md", ".sbatch"))
    ]
    pattern = re.compile("|".join(words) or "(?!)")
    found = []
    for path in sorted(root.rglob("*")):
        if path.suffix == ".md":
            for line in path.read_text().splitlines():
                found += [f"{path.relative_to(root)}: {m[0]}" for m in pattern.finditer(line)]
    return found


def problems(template: Path, names: str) -> list[str]:
    """What is wrong with a project that has these parts."""
    project = template.with_name(f"project-{len(list(template.parent.iterdir()))}")
    made = make_project(template, project, names)
    assert made.returncode == 0, made.stderr
    gone = [
        path
        for path in git(template, "ls-files").splitlines()
        if any(
            path == out or path.startswith(f"{out}/") for out in left_out(with_needs(names.split()))
        )
    ]
    found = unresolved(project) + mentions(project, gone)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--output-format=concise"]
        done = subprocess.run(ruff, cwd=project, capture_output=True, text=True)
        found += done.stdout.splitlines()
    return found


def test_every_path_of_a_part_is_there_and_in_one_part_only() -> None:
    paths = [path for part in PARTS.values() for path in part.paths] + list(TOGETHER) + LEFT_OUT
    for path in paths:
        assert (REPOSITORY / path).exists(), path
        others = [other for other in paths if f"{path}/".startswith(f"{other}/")]
        assert others == [path], path
    for name, part in PARTS.items():
        assert set(part.needs) <= PARTS.keys(), name
    for path, names in TOGETHER.items():
        assert set(names) <= PARTS.keys(), path


def without(name: str) -> str:
    """All parts but one and those that need it."""
    return " ".join(other for other in PARTS if name not in with_needs([other])) or "core"


@pytest.mark.parametrize("names", [*SETS.values(), without(OF_THIS_COMMIT)])
def test_a_project_of_some_parts_is_whole(names: str, template: Path) -> None:
    found = problems(template, names)
    assert not found, "\n".join([f"{names}:", *found])
