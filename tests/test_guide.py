"""GUIDE.md does what it says, file by file, command by command; README's picture is up to date."""

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compose import allowed_sets
from template.side_by_side import PICTURE, draw
from tests.helpers import ENVIRONMENT, FORKSERVER, REPOSITORY, _run, free_port, summary_of
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


def in_project(folder: Path, arguments: list[str], env: dict[str, str], prints: Path) -> None:
    """Run a project's script, whose modules are not those of the process that forked this one."""
    for module in [name for name in sys.modules if (REPOSITORY / name.partition(".")[0]).exists()]:
        del sys.modules[module]
    _run(folder, arguments, env, prints)


def follow(project: Path, command: list[str]) -> str:
    """What the command printed, on rank 0; two ranks stand for any number of them."""
    script = next(number for number, word in enumerate(command) if word.endswith(".py"))
    num_ranks = 2 if command[0] == "torchrun" else 1
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    prints = [project.parent / f"rank-{rank}.txt" for rank in range(num_ranks)]
    processes = []
    for rank, path in enumerate(prints):
        ranks = group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
        arguments = (project, command[script:], ENVIRONMENT | ranks, path)
        processes.append(FORKSERVER.Process(target=in_project, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join(240)
    texts = [path.read_text() for path in prints]
    assert all(process.exitcode == 0 for process in processes), "\n".join([*command, *texts])
    return texts[0]


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_projects_tests_pass_after_the_guide_and_without_a_model_and_a_task(
    tmp_path: Path,
) -> None:
    project = tmp_path / "mine"
    assert make_project(clone_template(tmp_path / "template"), project).returncode == 0
    add_own_parts(project)
    delete_part(project, "models", "unet")
    delete_part(project, "tasks", "multilabel")
    files = [f"tests/test_{name}.py" for name in ("tasks", "models", "config", "documents")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run([*command, "-m", "not slow"], cwd=project, capture_output=True, text=True)
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


@pytest.mark.timeout(900)  # nine runs, one after the other
def test_the_guides_path_leads_from_photos_to_predictions(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    assert make_project(clone_template(tmp_path / "template"), project).returncode == 0
    [heredoc] = [block for kind, block in BLOCKS if kind == "bash" and "<<" in block]
    program = heredoc.partition("\n")[2].removesuffix("END\n")
    subprocess.run([sys.executable, "-c", program], cwd=project, check=True)
    add_own_parts(project)
    printed, runs = dict[str, str](), dict[str, dict]()
    done: dict[tuple[str, ...], str] = {}
    for command in COMMANDS:
        if command[0] in ("git", "make", "source") or "NODE" in " ".join(command):
            continue
        if command[1] == "-m":  # python -m loaders.check
            command = ["python", command[2].replace(".", "/") + ".py", *command[3:]]
        *same, last = command
        if tuple(same) not in done:  # the guide trains `mine` again as `one`
            done[tuple(same)] = last
            printed[last] = follow(project, command)
        if last.startswith("output_dir="):
            folder = project / done[tuple(same)].removeprefix("output_dir=")
            runs[Path(last).name] = summary_of(folder)

    assert sorted(runs) == ["by_heart", "eight", "known", "mine", "one", "synthetic"]
    assert "500" in printed["data.root=data/photos"]
    assert runs["known"]["val/top1"] > 0.7  # chance is 0.1
    assert runs["mine"]["best_metric"] == "val/recall"
    assert runs["mine"]["val/recall"] > 0.5
    losses = re.findall(r"train/loss ([\d.]+)", printed["output_dir=outputs/by_heart"])
    assert float(losses[-1]) < 0.1
    assert (runs["one"]["world_size"], runs["eight"]["world_size"]) == (1, 2)
    assert runs["eight"]["val/loss"] == pytest.approx(runs["one"]["val/loss"], abs=1e-4)
    with (project / "outputs" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 500
    assert sum(row["prediction"] == Path(row["path"]).parent.name for row in rows) > 0.7 * 500
    assert (project / "outputs" / "mine.onnx").exists()
