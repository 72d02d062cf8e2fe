"""`runs.py` lists the runs of a folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import runs
from conf.errors import UserError
from tests.helpers import REPOSITORY, summary_of, train

SMALL = ["model.kwargs.width=8", "log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]


def listed(folder: Path, *arguments: str) -> list[list[str]]:
    """The lines that are printed, by table."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "runs.py", folder, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return [part.splitlines() for part in done.stdout.rstrip("\n").split("\n\n")]


def write_run(
    folder: Path,
    data: str,
    task: str,
    metric: str,
    value: float,
    loader: str = "pytorch",
    **more: str,
) -> None:
    folder.mkdir(parents=True)
    config = {"data": {"layout": data, "root": "photos"}, "task": {"name": task}}
    (folder / "config.yaml").write_text(json.dumps(config | {"loader": {"name": loader}}))
    (folder / "run.json").write_text(json.dumps({"settings": {"model.kwargs.text": 200 * "a"}}))
    summary = {"best": {metric: value}, "best_metric": metric, "perf/images_per_s": 100.0}
    (folder / "summary.json").write_text(json.dumps(summary | more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two real runs, one that learnt more, and what is left of one that never ended."""
    root = tmp_path_factory.mktemp("outputs")
    for name, steps in [("short", 5), ("long", 60)]:
        train("train.py", root / "train" / name, *SMALL, f"max_steps={steps}")
    (root / "killed").mkdir()
    shutil.copy(root / "train" / "long" / "config.yaml", root / "killed")
    start_of_it = {"script": "train.py", "settings": {"optimizer": "sgd"}}
    (root / "killed" / "run.json").write_text(json.dumps(start_of_it))
    (root / "no run").mkdir()
    return root


def test_runs_are_listed_with_their_settings_best_metric_and_speed(folder: Path) -> None:
    [[title, header, *lines]] = listed(folder)
    assert title == "data=mnist_mini data.root=data task=classification"
    assert header.split() == ["best", "images/s", "run", "settings"]
    for line, name in [(lines[0], "long"), (lines[1], "short")]:
        summary = summary_of(folder / "train" / name)
        speed = f"{summary['perf/images_per_s']:,.0f}"
        best = f"{summary['best']['val/top1']:.4f}"
        assert line.split()[:4] == ["val/top1", best, speed, f"train/{name}"]
        assert "  model.kwargs.width=8 log.images=0 optimizer.warmup_epochs=0.0 epochs=1" in line
        assert "output_dir" not in line
    assert lines[2].split() == ["-", "-", "killed", "optimizer=sgd"]


def test_runs_are_sorted_by_any_metric(folder: Path) -> None:
    def order(key: str) -> list[str]:
        [[_, _, *lines]] = listed(folder, f"sort={key}")
        return [name for line in lines for name in line.split() if name in names]

    names = ["killed", "train/long", "train/short"]
    assert order("val/loss") == ["train/long", "train/short", "killed"]
    assert order("name") == names
    speeds = {name: summary_of(folder / name)["perf/images_per_s"] for name in names[1:]}
    assert order("images/s") == [*sorted(speeds, key=lambda run: -speeds[run]), "killed"]


def test_runs_are_compared_with_those_of_their_data_and_task_only(tmp_path) -> None:
    write_run(tmp_path / "a", "table", "regression", "val/r2", 0.1)
    write_run(tmp_path / "b", "table", "classification", "val/top1", 0.2)
    write_run(tmp_path / "c", "imagefolder", "classification", "val/top1", 0.3)
    write_run(tmp_path / "d", "table", "classification", "val/top1", 0.9, "synthetic")
    write_run(tmp_path / ("long" * 20), "table", "classification", "val/top1", 0.4)
    tables = listed(tmp_path)
    runs = [[line.split()[3] for line in lines[2:]] for lines in tables]
    assert runs == [["c"], ["long" * 20, "b"], ["a"], ["d"]]
    assert "synthetic" in tables[-1][0]
    assert max(len(line) for lines in tables for line in lines) <= 120


def test_damaged_folders_are_named_and_the_others_are_shown(tmp_path) -> None:
    write_run(tmp_path / "good", "table", "regression", "val/r2", 0.5)
    contents = ["[]", "{", "null", "3", '{"best": 3, "settings": [], "data": "x"}', "\x00"]
    damages: dict[str, str] = {}
    for file in ("config.yaml", "run.json", "summary.json"):
        for content in [*contents, "[" * 100_000]:
            name = f"bad{len(damages)}"
            write_run(tmp_path / name, "table", "regression", "val/r2", 0.6)
            (tmp_path / name / file).write_text(content)
            damages[name] = file
    [_, _, shown], damaged = listed(tmp_path)
    assert "good" in shown
    assert damaged[0] == "damaged:"
    named = dict(line.split(": ", 1) for line in damaged[1:])
    assert named.keys() == damages.keys()
    assert all(file in named[name] for name, file in damages.items())


def test_the_lowest_error_comes_first(tmp_path) -> None:
    for value in (0.5, 0.125, 2.0):
        name = tmp_path / str(value)
        write_run(name, "table", "regression", "val/mae", value, best_mode="min")
    [[_, _, *lines]] = listed(tmp_path)
    assert [line.split()[1] for line in lines] == ["0.1250", "0.5000", "2.0000"]
    assert runs.read_run(tmp_path / "2.0", tmp_path).score("val/mae") == -2  # for a sweep's trials


def test_a_number_beyond_any_float_is_infinite(tmp_path) -> None:
    write_run(tmp_path / "good", "table", "regression", "val/r2", 0.5)
    write_run(tmp_path / "huge", "table", "regression", "val/r2", 10**400)
    [[_, _, *lines]] = listed(tmp_path)
    assert [line.split()[1] for line in lines] == ["inf", "0.5000"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere"], ["nowhere"]),
        (["no run"], ["no run"]),
        ([".", "sort=val/top3"], ["sort=val/top3", "best, images/s, name, val/loss"]),
        (["a", "b"], ["a b"]),
    ],
)
def test_mistakes_end_in_one_clear_error(
    folder: Path, monkeypatch, arguments: list[str], named: list[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["runs.py", *arguments])
    with pytest.raises(UserError) as error:
        runs.main()
    assert all(name in str(error.value) for name in named)


def test_it_is_a_plain_command_without_torch() -> None:
    code = "import sys, runs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    assert subprocess.run([sys.executable, "runs.py", "nowhere"], cwd=REPOSITORY).returncode == 2
