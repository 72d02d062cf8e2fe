"""Each part can be left out of a project: nothing that is left needs it or speaks of it."""

import ast
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from template.parts import left_out, listing, owner_of, read_parts, with_needs
from template.project import LEFT_OUT
from template.suites import SETS
from tests.helpers import REPOSITORY, run_all
from tests.images import make_photos
from tests.test_project import clone_template, commit, git, made, make_project, replace

PARTS, TOGETHER = read_parts()
OF_THIS_COMMIT = random.Random(git(REPOSITORY, "rev-parse", "HEAD")).choice(sorted(PARTS))
WITHOUT_IT = " ".join(x for x in PARTS if OF_THIS_COMMIT not in with_needs([x])) or "core"
SLOWLY = [pytest.param(names, marks=pytest.mark.slow) for names in SETS.values() if names != "core"]
DALI = SETS["two nodes, DDP, AMP and DALI"]
MERGED = ["ddp amp runs sweep predict slurm", DALI]
"""Those with SCRIPT=merged."""


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return clone_template(tmp_path_factory.mktemp("parts") / "template")


@pytest.fixture(scope="module")
def project_of(template: Path) -> Callable[[str], Path]:
    """Returns the project of these parts, each made when first asked for."""
    projects: dict[str, Path] = {}

    def project(names: str) -> Path:
        if names not in projects:
            projects[names] = template.with_name(f"project-{len(projects)}")
            made(template, projects[names], names, "merged" if names in MERGED else "")
        return projects[names]

    return project


@cache
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


def keys_of(root: Path) -> set[str]:
    """Keys and groups of a project's configuration."""
    table = (root / "docs" / "configuration.md").read_text()
    keys = set(re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE))
    return keys | {key.partition(".")[0] for key in keys if "." in key}


def mentions(root: Path, gone: list[str]) -> list[str]:
    """Places in documents that name files or configuration choices that a project does not have."""
    choices = [re.fullmatch(r"conf/(\w+)/(\w+)\.yaml", path) for path in gone]
    words = [rf"(?<!\w){c[1]}={c[2]}(?!\w)" for c in choices if c]
    words += [
        rf"(?<![\w/]){re.escape(path)}" for path in gone if path.endswith((".py", ".md", ".sbatch"))
    ]
    pattern = re.compile("|".join(words) or "(?!)")
    found = []
    for path in sorted(root.rglob("*.md")):
        text, name = path.read_text(), path.relative_to(root)
        found += [f"{name} names {match[0]}" for match in pattern.finditer(text)]
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
            if not (path.parent / link).exists():
                found.append(f"{name} links to {link}")
    return found


def uses_of_keys(root: Path, keys: set[str]) -> list[str]:
    """Places in the product that read configuration keys of other parts."""
    found = []
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] == "tests":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                used = ast.unparse(node).removeprefix("self.").removeprefix("cfg.")
                if used in keys and (ast.unparse(node) != used or "." in used):
                    found.append(f"{path.relative_to(root)} reads {used}")
    return found


def problems(project: Path, template: Path, names: str) -> list[str]:
    """What is wrong with a project of these parts: the part and the file, and what it needs."""
    out = left_out(with_needs(names.split()))
    files = git(template, "ls-files").splitlines()
    gone = [path for path in files if any(f"{path}/".startswith(f"{other}/") for other in out)]
    if names in MERGED:
        gone += ["compose.py", *(path for path in files if path.startswith("train_"))]
    found = unresolved(project) + mentions(project, gone)
    found += uses_of_keys(project, keys_of(template) - keys_of(project))
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--output-format=concise"]
        done = subprocess.run(ruff, cwd=project, capture_output=True, text=True)
        found += done.stdout.splitlines()
    return [
        f"{owner_of(re.split('[: ]', line)[0])} needs "
        f"{', '.join(sorted(needed(line, template, gone)))}: {line}"
        for line in found
    ]


def needed(line: str, template: Path, gone: list[str]) -> set[str]:
    """The parts whose name, key or file a problem is about."""
    word = re.findall(r"[\w./]+", line)[-1]
    if line.endswith(f"reads {word}"):
        schema = (template / "conf" / "schema.py").read_text()
        keys = [re.search(rf"^    {key}: .*# part: (\w+)", schema, re.M) for key in word.split(".")]
        return {key[1] for key in keys if key}
    defined = re.compile(rf"^(?:class |def ){word}\b|^{word}\b.* = ", re.MULTILINE)
    owners = {
        owner_of(path)
        for path in gone
        if path.endswith(f"/{word}")
        or (path.endswith(".py") and defined.search((template / path).read_text()))
    }
    return owners - {"core"}


def test_every_path_of_a_part_is_there_and_in_one_part_only() -> None:
    paths = [path for part in PARTS.values() for path in part.paths] + list(TOGETHER) + LEFT_OUT
    for path in paths:
        assert (REPOSITORY / path).exists(), path
        owners = {owner_of(other) for other in paths if f"{path}/".startswith(f"{other}/")}
        # A part may lie in the folder of one that it needs.
        assert len(owners) <= 1 or any(owners <= with_needs([name]) for name in owners), path
    for name, part in PARTS.items():
        assert set(part.needs) <= PARTS.keys(), name
    for path, names in TOGETHER.items():
        assert set("|".join(names).split("|")) <= PARTS.keys() | {"scripts"}, path


@pytest.mark.parametrize("names", [SETS["core"], WITHOUT_IT, MERGED[0], *SLOWLY])
def test_a_project_of_some_parts_is_whole(names: str, template: Path, project_of) -> None:
    found = problems(project_of(names), template, names)
    assert not found, "\n".join([f"{names}:", *found])


def num_lines(project: Path) -> tuple[int, int]:
    """Lines of Python and YAML of the product and of the tests."""
    files = git(project, "ls-files", "*.py", "*.yaml").splitlines()
    lines = {file: len((project / file).read_text().splitlines()) for file in files}
    of_tests = sum(lines[file] for file in files if file.startswith("tests/"))
    return sum(lines.values()) - of_tests, of_tests


def test_the_list_of_parts_has_the_lines_that_projects_have(project_of) -> None:
    files = git(REPOSITORY, "ls-files").splitlines()
    text = listing(REPOSITORY, [file for file in files if not file.startswith(tuple(LEFT_OUT))])
    product, of_tests = num_lines(project_of("core"))
    assert f"core       {product:6,}" in text
    assert product <= 5_500
    assert of_tests <= 3_000
    own = re.search(r"([\d,]+)  what PARTS=own has", text)
    assert own
    assert int(own[1].replace(",", "")) <= 4_200
    rows = re.findall(r"^  (\w+) +([\d,]+) +([\d,]+)  \w", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(PARTS)
    assert [name for name, *counts in rows if "0" in counts] == ["gpu"]  # tests alone


@pytest.mark.slow
def test_two_nodes_with_dali_take_few_lines(project_of) -> None:
    assert num_lines(project_of(DALI))[0] <= 7_000


def test_a_project_with_one_merged_script_names_no_other(project_of) -> None:
    project = project_of(MERGED[0])
    assert [path.name for path in project.glob("train*.py")] == ["train.py"]
    script, command = (
        (project / "train.py").read_text(),
        "torchrun --standalone --nproc_per_node=2 train.py",
    )
    assert re.findall(r"Start with `(.*?)`", script) == [command]
    assert "# new #" not in script
    assert "compose.py" not in script
    assert "DistributedDataParallel(" in script
    assert "scaler.scale(loss).backward()" in script
    for name in ("README.md", "Makefile", "docs/use.md"):
        text = (project / name).read_text()
        assert "python train.py" not in text, name
        assert name == "docs/use.md" or command in text
    assert "script=${SCRIPT:-train.py}" in (project / "launch" / "slurm.sbatch").read_text()


@pytest.mark.parametrize(
    ("parts", "message"),
    [("dali", "no technique"), ("ddp fsdp", "does not combine"), ("", "does not combine")],
)
def test_what_cannot_be_merged_is_refused(parts: str, message: str, template: Path) -> None:
    done = make_project(template, template.with_name("none"), parts, "merged")
    assert done.returncode == 1
    assert message in done.stderr
    assert not template.with_name("none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("names", ["core", *MERGED])
def test_a_project_of_some_parts_trains(names: str, project_of) -> None:
    """`make test-projects` trains the others."""
    project = project_of(names)
    command = ["train.py", "max_steps=2", "output_dir=outputs/run", "log.images=0"]
    if names == DALI:
        make_photos(project / "photos", 30)
        command += ["loader=dali", "data=imagefolder", "data.root=photos", "data.crop=28"]
        command += ["data.resize=32", "global_batch_size=4"]
    run_all([command], project.parent, 2 if names in MERGED else 1, project)
    assert (project / "outputs" / "run" / "checkpoints" / "last.pt").exists()


# file -> what is written in place of what, and the part that it then needs
FAULTS = {
    "tasks/classification.py": (
        "        self.label_smoothing =",
        "        from runtime.ema import EMA\n\n        EMA(self)\n        self.label_smoothing =",
        "ema",
    ),
    "runtime/setup.py": (
        "    set_numerics(cfg)\n",
        "    set_numerics(cfg)\n    print(cfg.amp.dtype)\n",
        "amp",
    ),
    "docs/installation.md": ("# Installation", "See [DDP](ddp.md).\n\n# Installation", "ddp"),
    "models/__init__.py": (
        "    if cfg.name not in MODELS:\n",
        "    if cfg.name == 'double':\n        return UNet(in_channels, num_outputs)\n"
        "    if cfg.name not in MODELS:\n",
        "unet",
    ),
}


def test_a_part_that_is_woven_into_another_one_is_named(tmp_path: Path) -> None:
    template, project = (tmp_path / name for name in ("template", "project"))
    clone_template(template, without="tests/")
    for file, (old, new, _) in FAULTS.items():
        replace(template / file, old, new)
    commit(template, "faults")
    made(template, project, "core")
    found = problems(project, template, "core")
    for file, (*_, name) in FAULTS.items():
        lines = [line for line in found if f": {file}" in line]
        assert any(line.startswith(f"core needs {name}:") for line in lines), (file, found)
    assert all(any(file in line for file in FAULTS) for line in found), found
