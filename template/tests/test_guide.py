"""GUIDE.md and the pages on own data do what they say."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import numpy as np
import pytest

from compose import allowed_sets
from template.tests.test_project import clone_template, made
from tests.helpers import REPOSITORY, SCRIPTS, has_ranks, run_all, summary_of, values_of

GUIDE = (REPOSITORY / "GUIDE.md").read_text()
PAGES = {path.stem: path.read_text() for path in (REPOSITORY / "docs/own_data").glob("*.md")}
SHAPES = [
    *("data=own", "data.name=shapes", "model=own", "model.name=detector", "task.name=detection"),
    *("global_batch_size=8", "epochs=1", "max_steps=3", "log.every_steps=1"),
]
SHORTER = {"known": ["epochs=2"], "by_heart": ["epochs=15"]}
"""What the test adds to the guide's commands, by their folders: it has less time."""

pytestmark = pytest.mark.timeout(600)


def test_readme_says_how_many_sets_of_techniques_merge() -> None:
    assert f"all {len(allowed_sets())} sets" in (REPOSITORY / "README.md").read_text()


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> list[list[str]]:
    """Those that start Python, one or several ranks."""
    text = "".join(block for block in blocks_of(page, "bash") if "<<" not in block)
    lines = text.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [command for command in commands if command[:1] in (["python"], ["torchrun"])]


def files_of(page: str) -> dict[str, str]:
    """A page's Python, by the file that it is for."""
    files = re.findall(r"`([a-z/]+/\w+\.py)` (?:adds|defines|generates|reads) ", page)
    return dict(zip(files, blocks_of(page, "python"), strict=True))


def add_own_parts(project: Path, page: str) -> None:
    """Write the files of a page."""
    for name, block in files_of(page).items():
        (project / name).write_text(block)


def follow(project: Path, commands: list[list[str]]) -> dict[str, str]:
    """What each command printed, on rank 0, by its last word; two ranks stand for any number.

    Those of one process run first, one after the other, as do then those of several.
    """
    printed: dict[str, str] = {}
    for num_ranks, launcher in ((1, "python"), (2, "torchrun")):
        scripts = []
        for command in commands:
            if command[0] == launcher:
                words = [word == "-m" or word.endswith(".py") for word in command]
                scripts.append(command[words.index(True) :])
        answers = run_all(scripts, project.parent, num_ranks, project) if scripts else []
        printed |= {script[-1]: text for script, text in zip(scripts, answers, strict=True)}
    return printed


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the guide's model and task."""
    folder = tmp_path_factory.mktemp("guide")
    made(clone_template(folder / "template"), folder / "mine")
    add_own_parts(folder / "mine", GUIDE)
    return folder / "mine"


def test_a_model_and_a_task_are_two_files_and_40_lines_with_own_data_three_and_100() -> None:
    for page, count, num_lines in [(GUIDE, 2, 40), *((page, 3, 100) for page in PAGES.values())]:
        files = files_of(page)
        assert len(files) == count
        assert sum(len(text.splitlines()) for text in files.values()) <= num_lines


@pytest.mark.slow
def test_the_projects_tests_pass_after_the_guide_and_without_a_model_and_a_task(
    project: Path, tmp_path: Path
) -> None:
    """Which are deleted as docs/recipes.md says."""
    smaller = copytree(project, tmp_path / "mine", ignore=ignore_patterns("outputs"))
    for kind, name in (("model", "unet"), ("task", "multilabel")):
        for path in (f"{kind}s/{name}.py", f"conf/{kind}/{name}.yaml"):
            (smaller / path).unlink()
        (smaller / f"tests/test_{kind}_{name}.py").unlink()
    subprocess.run([sys.executable, "-m", "conf.reference"], cwd=smaller, check=True)
    files = [f"tests/test_{name}.py" for name in ("tasks", "models", "config", "documents")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    command += ["-m", "not slow", "-k", "not batch"]
    done = subprocess.run(command, cwd=smaller, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_one_gpu_eight_gpus_and_two_machines_differ_in_the_launcher_only() -> None:
    commands = {Path(command[-1]).name: command[:-1] for command in commands_of(GUIDE)}
    one, eight, two = (commands[name] for name in ("one", "eight", "two"))
    assert (one[0], eight[0], two[0]) == ("python", "torchrun", "torchrun")
    options = [command[command.index("train_ddp.py") + 1 :] for command in (eight, two)]
    assert options == [one[one.index("train.py") + 1 :]] * 2


@pytest.mark.slow
def test_the_guides_path_leads_from_photos_to_predictions(project: Path) -> None:
    [heredoc] = [block for block in blocks_of(GUIDE, "bash") if "<<" in block]
    program = heredoc.partition("\n")[2].removesuffix("END\n")
    subprocess.run([sys.executable, "-c", program], cwd=project, check=True)
    commands = {
        Path(last).name: [*command, *SHORTER.get(Path(last).name, []), last]
        for *command, last in commands_of(GUIDE)
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


@pytest.fixture(scope="module")
def with_pages(project: Path) -> Path:
    """The project with the data, models and tasks of the pages on own data."""
    folder = copytree(project, project.with_name("own"), ignore=ignore_patterns("outputs"))
    for page in PAGES.values():
        add_own_parts(folder, page)
    return folder


def commands_of_page(name: str) -> list[list[str]]:
    """The page's command, the same on two ranks, and its predictions."""
    [one] = commands_of(PAGES[name])
    run = one[-1].removeprefix("output_dir=")
    options, folder = one[2:-1], f"{one[-1]}_ddp"
    two = ["torchrun", "train_ddp.py", *options, folder]
    merge = []
    if name == "text":
        merge = [["python", "compose.py", "ddp", "amp", "accumulate", "-o", "train_text.py"]]
        two = ["torchrun", "train_text.py", *options, "accumulate_steps=2", folder]
    predict = ["python", "predict.py", f"run={run}", "split=val", f"out={run}.csv"]
    return [one, *merge, two, predict]


def follow_page(
    project: Path, name: str, *more: list[str]
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, str]], dict[str, float]]:
    """The summaries of one process and of two ranks, the table of predictions and its metrics."""
    commands = commands_of_page(name)
    printed = follow(project, [*commands, *more])[commands[-1][-1]]
    folders = [words[-1] for words in commands if words[-1].startswith("output_dir=")]
    one, two = (summary_of(project / folder.removeprefix("output_dir=")) for folder in folders)
    with (project / commands[-1][-1].removeprefix("out=")).open() as file:
        rows = list(csv.DictReader(file))
    [metrics] = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert metrics == pytest.approx(one["best"], rel=1e-4)
    return one, two, rows, metrics


@pytest.mark.slow
def test_text(with_pages: Path) -> None:
    one, two, rows, _ = follow_page(with_pages, "text")
    assert one["val/perplexity"] < 40  # of a guess: 256
    assert two["val/perplexity"] == pytest.approx(one["val/perplexity"], rel=0.05)  # bfloat16
    assert len(rows) > 20


@pytest.mark.slow
def test_keypoints_come_back_in_pixels_of_the_source_and_after_a_resume(with_pages: Path) -> None:
    [one_process, ranks, _] = commands_of_page("keypoints")
    parts = ["resume=auto", "output_dir=outputs/parts"]
    more = [[*one_process[:-1], "max_steps=5", *parts], [*ranks[:-1], *parts]]
    one, two, rows, metrics = follow_page(with_pages, "keypoints", *more)
    assert one["val/error_px"] < 2
    assert two["val/error_px"] == pytest.approx(one["val/error_px"], abs=0.02)
    mine: dict[str, Any] = {}
    exec(files_of(PAGES["keypoints"])["loaders/own/dots.py"], mine)
    _, val = mine["dots"](None)
    places = ["red_x", "red_y", "green_x", "green_y", "blue_x", "blue_y"]
    found = np.array([[float(row[name]) for name in places] for row in rows]).reshape(-1, 3, 2)
    true = np.stack([val.photo(number)[1] for number in range(len(val))])
    errors = np.linalg.norm(found - true, axis=2)
    assert errors.mean() == pytest.approx(metrics["val/error_px"], rel=1e-3)

    resumed = summary_of(with_pages / "outputs" / "parts")
    assert resumed["val/loss"] == pytest.approx(two["val/loss"], rel=1e-3)


@pytest.mark.slow
def test_detection(with_pages: Path) -> None:
    one, two, rows, _ = follow_page(with_pages, "detection")
    assert one["val/map_50"] > 0.4
    for name in ("val/loss", "val/map", "val/map_50"):
        assert two[name] == pytest.approx(one[name], abs=0.02), name
    assert len(rows) == 64


@pytest.mark.slow
def test_nested_batches_run_in_every_script(with_pages: Path) -> None:
    commands = []
    for script in SCRIPTS:
        launcher = "torchrun" if has_ranks(script) else "python"
        more = ["accumulate_steps=2"] if "accumulate" in script else []
        commands.append([launcher, script, *SHAPES, *more, f"output_dir=outputs/{script}"])
    follow(with_pages, commands)
    expected = values_of(with_pages / "outputs" / "train.py", "train/loss")
    for script in SCRIPTS:
        found = values_of(with_pages / "outputs" / script, "train/loss")
        rel = 0.02 if "amp" in script else 1e-4
        assert found == pytest.approx(expected, rel=rel), script
