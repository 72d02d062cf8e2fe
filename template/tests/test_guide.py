"""GUIDE.md and the examples of own data do what they say."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from textwrap import dedent

import pytest

from template.tests.test_project import clone_template, make_project
from tests.helpers import REPOSITORY, SCRIPTS
from tests.processes import ENVIRONMENT, train
from tests.results import summary_of, values_of

GUIDE = (REPOSITORY / "GUIDE.md").read_text()
EXAMPLES = REPOSITORY / "examples"
OWN_DATA = (REPOSITORY / "docs" / "own_data.md").read_text()
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([a-z/]+/\w+\.py)` (?:adds|defines) ")

pytestmark = pytest.mark.timeout(600)


def blocks_of(page: str, language: str) -> list[str]:
    return [dedent(code) for name, code in BLOCK.findall(page) if name == language]


def run(commands: str, project: Path) -> str:
    """What command lines print in a shell; two ranks stand for any number."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-ec", re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=2", commands)]
    env = {**os.environ, **ENVIRONMENT, "PATH": path}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the model and the task of the guide."""
    folder = tmp_path_factory.mktemp("guide")
    make_project(clone_template(folder / "template"), folder / "mine")
    for name, text in zip(FILE.findall(GUIDE), blocks_of(GUIDE, "python"), strict=True):
        (folder / "mine" / name).write_text(text)
    return folder / "mine"


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
    rows = list(csv.DictReader((project / "outputs" / "predictions.csv").read_text().splitlines()))
    assert len(rows) == 500
    assert sum(row["prediction"] == Path(row["path"]).parent.name for row in rows) > 0.7 * 500
    assert (project / "outputs" / "mine.onnx").exists()


def command_of(example: str, project: Path) -> str:
    """The command of docs/own_data.md that trains an example, whose files the project gets."""
    [block] = [x for x in blocks_of(OWN_DATA, "bash") if f"examples/{example}/" in x]
    copying, _, command = block.partition("\n")
    assert copying.startswith(f"cp -r examples/{example}/* . ")
    copytree(EXAMPLES / example, project, dirs_exist_ok=True)
    return command.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "metric", "low", "high"),
    [("text", "perplexity", 1, 40), ("keypoints", "error_px", 0, 2), ("detection", "loss", 0, 1)],
)
def test_own_data_trains_alike_on_two_ranks_and_is_predicted(
    example: str, metric: str, low: float, high: float, project: Path
) -> None:
    command = command_of(example, project)
    folder = command.split("output_dir=")[1]
    ranks = "torchrun --standalone --nproc_per_node=2 train_ddp.py"
    several = command.replace("python train.py", ranks) + "_ddp"
    predict = f"python predict.py run={folder} split=val out={folder}.csv"
    run("\n".join([command, several, predict]), project)
    one, two = (summary_of(project / name) for name in (folder, f"{folder}_ddp"))
    assert low < one[f"val/{metric}"] < high
    assert two[f"val/{metric}"] == pytest.approx(one[f"val/{metric}"], rel=1e-2, abs=0.02)
    metrics = json.loads((project / f"{folder}.metrics.json").read_text())
    assert metrics == pytest.approx(one["best"], rel=1e-4)
    assert (project / f"{folder}.csv").read_text().count("\n") > 20
    if example == "detection":
        printed = run(f"python -m examples.average_precision {folder}.csv shapes", project)
        assert 0.4 < json.loads(printed.splitlines()[-1])["map_50"] < 1


@pytest.mark.slow
def test_nested_batches_run_in_every_script(project: Path) -> None:
    _, _, *options, _ = command_of("detection", project).replace("\\\n", " ").split()
    losses = {}
    for script in SCRIPTS:
        folder = project / "outputs" / script
        train(script, folder, *options, "max_steps=3", "log.every_steps=1", folder=project)
        losses[script] = values_of(folder, "train/loss")
    for script, found in losses.items():
        tolerance = 0.02 if "amp" in script else 1e-4
        assert found == pytest.approx(losses["train.py"], rel=tolerance), script
