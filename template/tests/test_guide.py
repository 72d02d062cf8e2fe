"""GUIDE.md and the pages on own data do what they say."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns
from textwrap import dedent

import pytest

from conf.cli import load_config
from template.tests.test_project import clone_template, made
from tests.helpers import (
    ENVIRONMENT,
    REPOSITORY,
    SCRIPTS,
    has_ranks,
    run_all,
    summary_of,
    values_of,
)
from tests.test_architecture import rows_of
from tests.test_side_by_side import allowed_sets

GUIDE = (REPOSITORY / "GUIDE.md").read_text()
PAGES = {path.stem: path.read_text() for path in (REPOSITORY / "docs/own_data").glob("*.md")}
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([a-z/]+/\w+\.py)` (?:adds|defines|generates|reads) ")

pytestmark = pytest.mark.timeout(600)


def blocks_of(page: str, language: str) -> list[str]:
    return [dedent(code) for name, code in BLOCK.findall(page) if name == language]


def files_of(page: str) -> dict[str, str]:
    """A page's Python, by the file that it is for."""
    return dict(zip(FILE.findall(page), blocks_of(page, "python"), strict=True))


def run(commands: str, project: Path) -> str:
    """What command lines print in a shell; two ranks stand for any number."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-ec", re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=2", commands)]
    env = {**os.environ, **ENVIRONMENT, "PATH": path}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the models, tasks and data of the guide and of the pages on own data."""
    folder = tmp_path_factory.mktemp("guide")
    made(clone_template(folder / "template"), folder / "mine")
    for page in (GUIDE, *PAGES.values()):
        for name, text in files_of(page).items():
            (folder / "mine" / name).write_text(text)
    return folder / "mine"


def test_readme_says_how_many_sets_of_techniques_merge() -> None:
    assert f"all {len(allowed_sets())} sets" in (REPOSITORY / "README.md").read_text()


def test_what_the_page_for_users_of_other_frameworks_names_exists() -> None:
    page = (REPOSITORY / "docs" / "coming_from.md").read_text()
    shown = [*REPOSITORY.glob("train*.py"), *(REPOSITORY / "tasks").rglob("*.py")]
    shown += [REPOSITORY / "runtime/checkpoint.py"]
    code = "".join(path.read_text() for path in shown)
    rows = rows_of(page, "Coming from Lightning, accelerate or timm")
    named = [name for *_, here in rows for name in re.findall("`(.*?)`", here)]
    assert len(named) > len(rows) > 20
    for name in named:
        if re.match(r"[\w.]+=", name):
            load_config([name])
        else:
            command = name.removeprefix("python ")
            if command.startswith("-m "):
                command = command.removeprefix("-m ").replace(".", "/", 1).replace(" ", ".py ", 1)
            path = REPOSITORY / command.partition(" ")[0]
            assert path.exists() or name.removesuffix(")") in code, name


def test_a_model_and_a_task_are_two_files_and_40_lines_with_own_data_three_and_100() -> None:
    for page, count, num_lines in [(GUIDE, 2, 40), *((page, 3, 100) for page in PAGES.values())]:
        files = files_of(page)
        assert len(files) == count
        assert sum(len(text.splitlines()) for text in files.values()) <= num_lines


@pytest.mark.slow
def test_the_guides_path_leads_from_photos_to_predictions(project: Path) -> None:
    _, *blocks = blocks_of(GUIDE, "bash")  # the first one makes the project
    printed = ""
    for block in blocks:
        block, _, two_machines = block.partition("torchrun --nnodes")
        if two_machines:
            options = re.findall(r"train\w*\.py([^>]*?)output_dir", f"{block}{two_machines}")
            assert len({" ".join(each.replace("\\", "").split()) for each in options}) == 1
        printed += run(block.replace("epochs=40", "epochs=15"), project)
    runs = {path.name: summary_of(path) for path in (project / "outputs").glob("*/")}
    assert sorted(runs) == ["by_heart", "eight", "known", "mine", "one", "synthetic"]
    assert runs["known"]["val/top1"] > 0.7  # chance is 0.1
    assert runs["mine"]["best_metric"] == "val/skill"
    assert runs["mine"]["val/skill"] > 0.5
    losses = values_of(project / "outputs" / "by_heart", "train/loss")
    assert losses[-1] < 0.5 < losses[0]
    assert (runs["one"]["world_size"], runs["eight"]["world_size"]) == (1, 2)
    assert runs["eight"]["val/loss"] == pytest.approx(runs["one"]["val/loss"], abs=1e-4)
    rows = table_of(project / "outputs" / "predictions.csv")
    assert len(rows) == 500
    assert sum(row["prediction"] == Path(row["path"]).parent.name for row in rows) > 0.7 * 500
    assert (project / "outputs" / "mine.onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "metric", "low", "high"),
    [
        ("text", "perplexity", 1, 40),
        ("keypoints", "error_px", 0, 2),
        ("detection", "loss", 0, 1),
    ],
)
def test_own_data_trains_alike_on_two_ranks_and_is_predicted(
    page: str, metric: str, low: float, high: float, project: Path
) -> None:
    [command] = blocks_of(PAGES[page], "bash")
    folder = command.split("output_dir=")[1].strip()
    ranks = "torchrun --standalone --nproc_per_node=2 train_ddp.py"
    several = command.replace("python train.py", ranks).strip() + "_ddp\n"
    run(f"{command}{several}python predict.py run={folder} split=val out={folder}.csv", project)
    one, two = (summary_of(project / name) for name in (folder, f"{folder}_ddp"))
    assert low < one[f"val/{metric}"] < high
    assert two[f"val/{metric}"] == pytest.approx(one[f"val/{metric}"], rel=1e-2, abs=0.02)
    metrics = json.loads((project / f"{folder}.metrics.json").read_text())
    assert metrics == pytest.approx(one["best"], rel=1e-4)
    assert len(table_of(project / f"{folder}.csv")) > 20
    if page == "detection":
        printed = run(f"python -m examples.average_precision {folder}.csv shapes", project)
        assert 0.4 < json.loads(printed.splitlines()[-1])["map_50"] < 1


@pytest.mark.slow
def test_nested_batches_run_in_every_script(project: Path) -> None:
    [command] = blocks_of(PAGES["detection"], "bash")
    options = command.replace("\\\n", " ").split()[2:-1]
    for num_ranks in (1, 2):
        commands = [
            [script, *options, "max_steps=3", "log.every_steps=1", f"output_dir=outputs/{script}"]
            for script in SCRIPTS
            if has_ranks(script) == (num_ranks == 2)
        ]
        run_all(commands, project.parent, num_ranks, project)
    expected = values_of(project / "outputs" / "train.py", "train/loss")
    for script in SCRIPTS:
        found = values_of(project / "outputs" / script, "train/loss")
        assert found == pytest.approx(expected, rel=0.02 if "amp" in script else 1e-4), script


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
    tests = " ".join(f"tests/test_{name}.py" for name in ("tasks", "config", "documents"))
    options = "-q -x -p no:cacheprovider -m 'not slow' -k 'not batch'"
    run(f"python -m conf.reference; python -m pytest {options} {tests}", smaller)
