"""The pages on data of one's own do what they say, and such data runs in every script."""

import csv
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import REPOSITORY, SCRIPTS, has_ranks, summary_of, values_of
from tests.test_guide import add_own_parts, follow
from tests.test_project import clone_template, make_project

PAGES = {path.stem: path.read_text() for path in (REPOSITORY / "docs/own_data").glob("*.md")}
SHAPES = [
    *("data=own", "data.name=shapes", "model=own", "model.name=detector", "task.name=detection"),
    *("global_batch_size=8", "epochs=1", "max_steps=3", "log.every_steps=1"),
]


def blocks_of(page: str) -> dict[str, str]:
    """A page's Python, by the file that it is for."""
    files = re.findall(r"`((?:mine|tasks)/\w+\.py)` ", page)
    files += [f"{folder}/__init__.py" for folder in ("loaders/own", "models", "tasks")]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return dict(zip(files, blocks, strict=True))


def commands_of(page: str) -> list[list[str]]:
    [commands] = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    return [shlex.split(line) for line in commands.replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the data, models and tasks of all pages."""
    folder = tmp_path_factory.mktemp("pages")
    template = clone_template(folder / "template", without="tests/")
    assert make_project(template, folder / "mine").returncode == 0
    for page in PAGES.values():
        add_own_parts(folder / "mine", blocks_of(page))
    return folder / "mine"


def follow_page(
    project: Path, name: str, more: Sequence[list[str]] = ()
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, str]], dict[str, float]]:
    """The summaries of one process and of two ranks, the table of predictions and its metrics."""
    commands = commands_of(PAGES[name])
    printed = follow(project, [*commands, *more])[commands[-1][-1]]
    one, two = [
        summary_of(project / word.removeprefix("output_dir="))
        for command in commands
        for word in command
        if word.startswith("output_dir=")
    ]
    table = project / commands[-1][-1].removeprefix("out=")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    [metrics] = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert metrics == pytest.approx(one["best"], rel=1e-4)
    return one, two, rows, metrics


@pytest.mark.parametrize("name", PAGES)
def test_data_of_ones_own_is_two_files_and_100_lines(name: str) -> None:
    blocks = blocks_of(PAGES[name])
    assert len([file for file in blocks if not file.endswith("__init__.py")]) == 2
    assert sum(len(block.splitlines()) for block in blocks.values()) <= 100


@pytest.mark.timeout(600)
def test_text(project: Path) -> None:
    one, two, rows, _ = follow_page(project, "text")
    assert one["val/perplexity"] < 40  # of a guess: 256
    assert two["val/perplexity"] == pytest.approx(one["val/perplexity"], rel=0.05)  # bfloat16
    assert len(rows) > 20


@pytest.mark.timeout(600)
def test_keypoints_come_back_in_pixels_of_the_source_and_after_a_resume(project: Path) -> None:
    [one_process, ranks, _] = commands_of(PAGES["keypoints"])
    parts = ["resume=auto", "output_dir=outputs/parts"]
    more = [[*one_process[:-1], "max_steps=5", *parts], [*ranks[:-1], *parts]]
    one, two, rows, metrics = follow_page(project, "keypoints", more)
    assert one["val/error_px"] < 2
    assert two["val/error_px"] == pytest.approx(one["val/error_px"], abs=0.02)
    mine: dict[str, Any] = {}
    exec(blocks_of(PAGES["keypoints"])["mine/dots.py"], mine)
    _, val = mine["dots"](None)
    assert len(rows) == len(val)
    places = ["red_x", "red_y", "green_x", "green_y", "blue_x", "blue_y"]
    found = np.array([[float(row[name]) for name in places] for row in rows]).reshape(-1, 3, 2)
    true = np.stack([val.photo(number)[1] for number in range(len(val))])
    errors = np.linalg.norm(found - true, axis=2)
    assert errors.mean() == pytest.approx(metrics["val/error_px"], rel=1e-3)

    resumed = summary_of(project / "outputs" / "parts")
    assert resumed["val/loss"] == pytest.approx(two["val/loss"], rel=1e-3)


@pytest.mark.timeout(600)
def test_detection(project: Path) -> None:
    one, two, rows, _ = follow_page(project, "detection")
    assert one["val/map_50"] > 0.4
    for name in ("val/loss", "val/map", "val/map_50"):
        assert two[name] == pytest.approx(one[name], abs=0.02), name
    mine: dict[str, Any] = {}
    exec(blocks_of(PAGES["detection"])["mine/shapes.py"], mine)
    _, val = mine["shapes"](None)
    assert len(rows) == len(val)


@pytest.mark.timeout(600)
def test_nested_batches_run_in_every_script(project: Path) -> None:
    commands = []
    for script in SCRIPTS:
        launcher = "torchrun" if has_ranks(script) else "python"
        more = ["accumulate_steps=2"] if "accumulate" in script else []
        commands.append([launcher, script, *SHAPES, *more, f"output_dir=outputs/{script}"])
    follow(project, commands)
    expected = values_of(project / "outputs" / "train.py", "train/loss")
    for script in SCRIPTS:
        found = values_of(project / "outputs" / script, "train/loss")
        rel = 0.02 if "amp" in script else 1e-4
        assert found == pytest.approx(expected, rel=rel), script
