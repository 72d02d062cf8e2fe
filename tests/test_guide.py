"""GUIDE.md does what it says, file by file, command by command; README's picture is up to date."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from compose import allowed_sets
from template.side_by_side import PICTURE, draw
from tests.helpers import REPOSITORY, run_all, summary_of
from tests.test_project import clone_template, make_project

GUIDE = (REPOSITORY / "GUIDE.md").read_text()
BLOCKS = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", GUIDE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for kind, block in BLOCKS
    if kind == "bash" and "<<" not in block
    for line in block.replace("\\\n", " ").splitlines()
]


def test_the_picture_shows_the_scripts_as_they_are() -> None:
    assert PICTURE.read_text() == draw(), "run python template/side_by_side.py"


def test_readme_says_how_many_sets_of_techniques_merge() -> None:
    assert f"all {len(allowed_sets())} sets" in (REPOSITORY / "README.md").read_text()


def follow(project: Path, commands: list[list[str]]) -> dict[str, str]:
    """What each command printed, on rank 0, by its last word; two ranks stand for any number.

    Those of one process run first, one after the other, as do then those of several.
    """
    printed: dict[str, str] = {}
    for num_ranks, launcher in ((1, "python"), (2, "torchrun")):
        launched = [command for command in commands if command[0] == launcher]
        first = [
            next(n for n, word in enumerate(command) if word == "-m" or word.endswith(".py"))
            for command in launched
        ]
        scripts = [command[n:] for command, n in zip(launched, first, strict=True)]
        answers = run_all(scripts, project.parent, num_ranks, project) if scripts else []
        printed |= {script[-1]: text for script, text in zip(scripts, answers, strict=True)}
    return printed


def python_blocks() -> dict[str, str]:
    """The guide's Python, by the file that it is for."""
    files = re.findall(r"^`((?:models|tasks)/\w+\.py)`", GUIDE, re.MULTILINE)
    files += re.findall(r"`((?:models|tasks)/__init__\.py)`", GUIDE)
    return dict(zip(files, [block for kind, block in BLOCKS if kind == "python"], strict=True))


def add_own_parts(project: Path, blocks: dict[str, str] | None = None) -> None:
    """Do the guide's second step."""
    for name, block in (blocks or python_blocks()).items():
        path = project / name
        if path.name != "__init__.py":
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
            continue
        added, entry = block.splitlines(keepends=True)
        package = ".".join(path.parent.relative_to(project).parts)
        before, start, imports = path.read_text().partition(f"from {package}.")
        imports, opened, entries = imports.partition("= {\n")
        path.write_text(before + added + start + imports + opened + entry + entries)


def delete_part(project: Path, folder: str, name: str) -> None:
    """Do what docs/recipes.md says of a part that is not needed."""
    for path in (f"{folder}/{name}.py", f"conf/{folder[:-1]}/{name}.yaml"):
        (project / path).unlink()
    (project / f"tests/test_{folder[:-1]}_{name}.py").unlink()
    table = project / folder / "__init__.py"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if name not in line.lower()))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the guide's model and task."""
    folder = tmp_path_factory.mktemp("guide")
    assert make_project(clone_template(folder / "template"), folder / "mine").returncode == 0
    add_own_parts(folder / "mine")
    return folder / "mine"


@pytest.mark.slow
def test_the_projects_tests_pass_after_the_guide_and_without_a_model_and_a_task(
    project: Path, tmp_path: Path
) -> None:
    smaller = copytree(project, tmp_path / "mine", ignore=ignore_patterns("outputs"))
    delete_part(smaller, "models", "unet")
    delete_part(smaller, "tasks", "multilabel")
    files = [f"tests/test_{name}.py" for name in ("tasks", "models", "config", "documents")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    command += ["-m", "not slow", "-k", "not batch"]
    done = subprocess.run(command, cwd=smaller, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_model_and_a_task_are_two_files_and_40_lines() -> None:
    blocks = python_blocks()
    new = [name for name in blocks if not name.endswith("__init__.py")]
    assert len(new) == 2
    assert sum(len(block.splitlines()) for block in blocks.values()) <= 40


def test_one_gpu_eight_gpus_and_two_machines_differ_in_the_launcher_only() -> None:
    [one], [eight, two] = (
        [c for c in COMMANDS if c[0] == launcher and c[-1].endswith(("/one", "/eight", "/two"))]
        for launcher in ("python", "torchrun")
    )
    options = [
        command[command.index(script) + 1 : -1]
        for command, script in ((one, "train.py"), (eight, "train_ddp.py"), (two, "train_ddp.py"))
    ]
    assert options[0] == options[1] == options[2]


SHORTER = {"known": ["epochs=2"], "by_heart": ["epochs=15"]}
"""What the test adds to the guide's commands, by their folders: it has less time."""


def test_the_guides_path_leads_from_photos_to_predictions(project: Path) -> None:
    [heredoc] = [block for kind, block in BLOCKS if kind == "bash" and "<<" in block]
    program = heredoc.partition("\n")[2].removesuffix("END\n")
    subprocess.run([sys.executable, "-c", program], cwd=project, check=True)
    commands = {
        Path(last).name: [*command, *SHORTER.get(Path(last).name, []), last]
        for *command, last in COMMANDS
        if command and command[0] in ("python", "torchrun")
    }
    assert commands["one"][:-1] == commands["mine"][:-1]
    del commands["one"], commands["two"]  # the same, and on two machines
    printed = follow(project, list(commands.values()))
    runs = {path.name: summary_of(path) for path in (project / "outputs").glob("*/")}

    assert sorted(runs) == ["by_heart", "eight", "known", "mine", "synthetic"]
    assert "500" in printed["data.root=data/photos"]
    assert runs["known"]["val/top1"] > 0.7  # chance is 0.1
    assert runs["mine"]["best_metric"] == "val/skill"
    assert runs["mine"]["val/skill"] > 0.5
    losses = re.findall(r"train/loss ([\d.]+)", printed["output_dir=outputs/by_heart"])
    assert float(losses[-1]) < 0.5 < float(losses[0])
    assert (runs["mine"]["world_size"], runs["eight"]["world_size"]) == (1, 2)
    assert runs["eight"]["val/loss"] == pytest.approx(runs["mine"]["val/loss"], abs=1e-4)
    with (project / "outputs" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 500
    assert sum(row["prediction"] == Path(row["path"]).parent.name for row in rows) > 0.7 * 500
    assert (project / "outputs" / "mine.onnx").exists()
