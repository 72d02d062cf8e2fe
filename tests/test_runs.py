"""`tools.runs` lists the runs of a folder."""

import json
import math
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.helpers import refused
from tests.processes import train
from tests.results import summary_of
from tools import runs


def listed(folder: Path, *arguments: str) -> list[list[str]]:
    """The cells of each line below the header: best value, speed, run and settings."""
    with redirect_stdout(StringIO()) as printed:
        runs.main([str(folder), *arguments])
    header, *lines = [re.split("  +", line) for line in printed.getvalue().splitlines()]
    assert header == ["best", "samples/s", "run", "settings"]
    return lines


def names(*arguments: Any) -> str:
    return " ".join(line[2] for line in listed(*arguments))


def write_run(
    folder: Path,
    best: dict[str, float],
    config: str = "layout: table",
    mode: str = "max",
    speed: float = 100,
    **settings: Any,
) -> None:
    """A run with these metrics of its best epoch, the first of which has chosen it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"data: {{{config}}}\n")
    (folder / "run.json").write_text(json.dumps({"settings": settings}))
    summary = {"best": best, "best_metric": next(iter(best)), "best_mode": mode}
    (folder / "summary.json").write_text(json.dumps(summary | {"perf/images_per_s": speed}))


def test_a_run_is_listed_with_its_settings_best_metric_and_speed(tmp_path) -> None:
    run = tmp_path / "runs" / "train" / "short"
    train("train.py", run, "model.kwargs.width=8", "optimizer.warmup_epochs=0", "max_steps=5")
    root = (tmp_path / "runs").rename(tmp_path / "lr=0.1")  # a folder may have any name
    (root / "no run").mkdir()
    [line] = listed(root)
    summary = summary_of(root / "train" / "short")
    best, speed = summary["best"]["val/top1"], summary["perf/images_per_s"]
    assert line[:3] == [f"val/top1 {best:.4f}", f"{speed:,.0f}", "train/short"]
    assert line[3] == "model.kwargs.width=8 optimizer.warmup_epochs=0 max_steps=5"


def test_runs_are_sorted_by_any_metric_and_damaged_ones_are_left_out(tmp_path, capsys) -> None:
    for name, value, loss, speed in [("a", 0.1, 3, 20), ("b", 0.3, 2, 1e3), ("c", 0.2, 1, 5)]:
        write_run(tmp_path / name, {"val/top1": value, "val/loss": loss}, speed=speed)
    write_run(tmp_path / "killed", {"val/top1": 0.9})
    (tmp_path / "killed" / "summary.json").unlink()
    orders = {"best": "b c a", "val/loss": "c b a", "name": "a b c", "samples/s": "b a c"}
    for key, expected in orders.items():
        assert names(tmp_path, f"sort={key}") == f"{expected} killed"
    assert listed(tmp_path)[3] == ["-", "-", "killed", "-"]
    with refused("sort=val/top3 is unknown; use one of best, name, samples/s, val/loss"):
        listed(tmp_path, "sort=val/top3")
    for content in ("{", "[1]", ""):
        (tmp_path / "a" / "config.yaml").write_text(content)
        assert names(tmp_path) == "b c killed"
        assert f"{tmp_path}/a is left out" in capsys.readouterr().err


def test_runs_stand_with_those_of_their_data_and_the_lowest_error_is_first(tmp_path) -> None:
    write_run(tmp_path / "a", {"val/mae": 0.5}, mode="min")
    write_run(tmp_path / "b", {"val/mae": 0.125}, mode="min")
    write_run(tmp_path / "c", {"val/mae": 2.0}, "layout: tiles", mode="min")
    write_run(tmp_path / "d", {"val/mae": 0.0}, "layout: u}\nloader: {name: synthetic", mode="min")
    assert names(tmp_path) == "b a c d"
    assert runs.read_run(tmp_path / "c", tmp_path).score("val/mae") == -2  # for a sweep's trials


def test_the_mean_and_the_standard_deviation_of_folds_that_have_ended_have_a_line(tmp_path) -> None:
    """The best mean is first; a run of all data is in none."""
    write_run(tmp_path / "whole", {"val/top1": 0.95}, rate=2)
    folds = {1: [0.1, 0.2, 0.6], 2: [0.3, 0.4, 0.5], 3: [0.9], 4: [0.05, 0.45, 0.7]}
    for rate, values in folds.items():
        for fold, value in enumerate(values):
            best = {"val/top1": value, "val/loss": 1 - value, "val/rare": math.nan}
            settings: dict[str, Any] = {"rate": rate, "data.fold": fold}
            write_run(tmp_path / f"{rate}-{fold}", best, f"layout: table, fold: {fold}", **settings)
    (tmp_path / "4-2" / "summary.json").unlink()
    assert listed(tmp_path)[:3] == [
        ["val/top1 0.4000 ± 0.1000", "100", "mean of 3 folds", "rate=2"],
        ["val/top1 0.3000 ± 0.2646", "100", "mean of 3 folds", "rate=1"],
        ["val/top1 0.2500 ± 0.2828", "100", "mean of 2 folds", "rate=4"],
    ]
    assert names(tmp_path).endswith("folds whole 3-0 1-2 2-2 4-1 2-1 2-0 1-1 1-0 4-0 4-2")
    assert listed(tmp_path, "sort=val/loss")[0][0] == "val/loss 0.6000 ± 0.1000"
