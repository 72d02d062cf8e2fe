"""`runs.py` lists the runs of a folder."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import runs
from tests.helpers import refused, summary_of, train

SMALL = ["model.kwargs.width=8", "log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]


def listed(folder: Path, *arguments: str) -> list[list[str]]:
    """The lines that are printed, by table."""
    with redirect_stdout(StringIO()) as printed:
        runs.main([str(folder), *arguments])
    return [part.splitlines() for part in printed.getvalue().rstrip("\n").split("\n\n")]


def write_run(
    folder: Path, value: float, data: str = "table", loader: str = "pytorch", **more: object
) -> None:
    """A run whose best value of val/top1 is `value`; `more` is added to its summary."""
    folder.mkdir(parents=True)
    config = {"data": {"layout": data, "root": "photos"}, "task": {"name": "classification"}}
    (folder / "config.yaml").write_text(json.dumps(config | {"loader": {"name": loader}}))
    (folder / "run.json").write_text(json.dumps({"settings": {"model.kwargs.text": 200 * "a"}}))
    metric = more.setdefault("best_metric", "val/top1")
    summary = {"best": {metric: value}, "perf/images_per_s": 100.0}
    (folder / "summary.json").write_text(json.dumps(summary | more))


def names_in(lines: list[str]) -> list[str]:
    rows = lines[2 + any(line.startswith("all: ") for line in lines) :]
    return [line.split()[3] for line in rows]


def test_a_run_is_listed_with_its_settings_best_metric_and_speed(tmp_path) -> None:
    run = tmp_path / "train" / "short"
    train("train.py", run, *SMALL, "max_steps=5")
    (tmp_path / "no run").mkdir()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.yaml").write_text((run / "config.yaml").read_text())
    (tmp_path / "killed" / "run.json").write_text('{"settings": {"optimizer": "sgd"}}')
    [[title, header, line, killed]] = listed(tmp_path)
    assert title == "data=mnist_mini data.root=data task=classification"
    assert header.split() == ["best", "images/s", "run", "settings"]
    summary = summary_of(run)
    best, speed = summary["best"]["val/top1"], summary["perf/images_per_s"]
    assert line.split()[:4] == ["val/top1", f"{best:.4f}", f"{speed:,.0f}", "train/short"]
    assert "  model.kwargs.width=8 log.images=0 optimizer.warmup_epochs=0.0 epochs=1" in line
    assert "output_dir" not in line
    assert killed.split() == ["-", "-", "killed", "optimizer=sgd"]


def test_runs_are_sorted_by_any_metric(tmp_path) -> None:
    for name, value, loss, speed in [("a", 0.1, 3, 20), ("b", 0.3, 2, 1e3), ("c", 0.2, 1, 5)]:
        best = {"val/top1": value, "val/loss": loss}
        more: dict[str, Any] = {"perf/images_per_s": speed, "best": best}
        write_run(tmp_path / name, value, **more)
    write_run(tmp_path / "killed", 0.9)
    (tmp_path / "killed" / "summary.json").unlink()
    orders = {"best": "bca", "val/loss": "cba", "name": "abc", "images/s": "bac"}
    for key, expected in orders.items():
        [[_, _, _, *lines]] = listed(tmp_path, f"sort={key}")
        assert [line.split()[-2] for line in lines] == [*expected, "killed"], key
    with refused("sort=val/top3 is unknown; use one of best, images/s, name, val/loss"):
        listed(tmp_path, "sort=val/top3")


def test_runs_are_compared_with_those_of_their_data_and_task_only(tmp_path) -> None:
    write_run(tmp_path / "a", 0.2)
    write_run(tmp_path / "b", 0.3, "imagefolder")
    write_run(tmp_path / "c", 0.9, loader="synthetic")
    write_run(tmp_path / ("long" * 20), 0.4)
    tables = listed(tmp_path)
    assert [names_in(lines) for lines in tables] == [["b"], ["long" * 20, "a"], ["c"]]
    assert "synthetic" in tables[-1][0]
    assert max(len(line) for lines in tables for line in lines) <= 120


def test_damaged_folders_are_named_and_the_others_are_shown(tmp_path) -> None:
    write_run(tmp_path / "good", 0.5)
    for file in ("config.yaml", "run.json", "summary.json"):
        for number, content in enumerate(("[]", "{", "\x00")):
            write_run(tmp_path / f"{number}-{file}", 0.6)
            (tmp_path / f"{number}-{file}" / file).write_text(content)
    [lines, [title, *damaged]] = listed(tmp_path)
    assert names_in(lines) == ["good"]
    assert (title, len(damaged)) == ("damaged:", 9)
    for folder, problem in (line.split(": ", 1) for line in damaged):
        assert folder.partition("-")[2] in problem


def test_the_lowest_error_comes_first(tmp_path) -> None:
    for value in (0.5, 0.125, 2.0):
        write_run(tmp_path / str(value), value, best_metric="val/mae", best_mode="min")
    [[_, _, _, *lines]] = listed(tmp_path)
    assert [line.split()[1] for line in lines] == ["0.1250", "0.5000", "2.0000"]
    assert {line.split()[-1] for line in lines} == {"-"}  # their settings are above the table
    row = runs.read_run(tmp_path / "2.0", tmp_path)
    assert row.score("val/mae") == -2  # for a sweep's trials
