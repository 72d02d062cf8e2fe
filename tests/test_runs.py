"""`tools.runs` lists the runs of a folder."""

import json
import math
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.helpers import refused
from tests.processes import train
from tests.results import summary_of
from tools import runs

SMALL = ["model.kwargs.width=8", "log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]


def listed(folder: Path, *arguments: str) -> list[str]:
    """The lines that are printed below the header."""
    with redirect_stdout(StringIO()) as printed:
        runs.main([str(folder), *arguments])
    header, *lines = printed.getvalue().splitlines()
    assert header.split() == ["best", "samples/s", "run", "settings"]
    return lines


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
    run = tmp_path / "train" / "short"
    train("train.py", run, *SMALL, "max_steps=5")
    (tmp_path / "no run").mkdir()
    [line] = listed(tmp_path)
    summary = summary_of(run)
    best, speed = summary["best"]["val/top1"], summary["perf/images_per_s"]
    assert line.split()[:4] == ["val/top1", f"{best:.4f}", f"{speed:,.0f}", "train/short"]
    assert "  model.kwargs.width=8 log.images=0 optimizer.warmup_epochs=0.0 epochs=1" in line
    assert "output_dir" not in line


def test_runs_are_sorted_by_any_metric(tmp_path) -> None:
    for name, value, loss, speed in [("a", 0.1, 3, 20), ("b", 0.3, 2, 1e3), ("c", 0.2, 1, 5)]:
        write_run(tmp_path / name, {"val/top1": value, "val/loss": loss}, speed=speed)
    write_run(tmp_path / "killed", {"val/top1": 0.9})
    (tmp_path / "killed" / "summary.json").unlink()
    orders = {"best": "bca", "val/loss": "cba", "name": "abc", "samples/s": "bac"}
    for key, expected in orders.items():
        *lines, killed = listed(tmp_path, f"sort={key}")
        assert [line.split()[-2] for line in lines] == [*expected], key
        assert killed.split() == ["-", "-", "killed", "-"]
    with refused("sort=val/top3 is unknown; use one of best, name, samples/s, val/loss"):
        listed(tmp_path, "sort=val/top3")


def test_runs_are_compared_with_those_of_their_data_only_and_the_lowest_error_is_first(
    tmp_path,
) -> None:
    write_run(tmp_path / "a", {"val/mae": 0.5}, mode="min")
    write_run(tmp_path / "b", {"val/mae": 0.125}, mode="min")
    write_run(tmp_path / "c", {"val/mae": 2.0}, "layout: tiles", mode="min")
    write_run(tmp_path / "d", {"val/mae": 0.0}, "layout: u}\nloader: {name: synthetic", mode="min")
    assert [line.split()[3] for line in listed(tmp_path)] == ["b", "a", "c", "d"]
    assert runs.read_run(tmp_path / "c", tmp_path).score("val/mae") == -2  # for a sweep's trials


def test_folds_have_a_line_with_their_mean_and_standard_deviation(tmp_path) -> None:
    """The best mean is first."""
    write_run(tmp_path / "whole", {"val/top1": 0.95}, "layout: whole")
    for rate, values in {1: [0.1, 0.2, 0.6], 2: [0.3, 0.4, 0.5], 3: [0.9]}.items():
        for fold, value in enumerate(values):
            best = {"val/top1": value, "val/loss": 1 - value, "val/rare": math.nan}
            settings: dict[str, Any] = {"rate": rate, "data.fold": fold}
            config = f"layout: table, fold: {fold}, num_folds: 3"
            write_run(tmp_path / f"{rate}-{fold}", best, config, **settings)
    folds = listed(tmp_path)
    means = [line.split("  ") for line in folds if "mean of 3 folds" in line]
    assert means == [line.split("  ") for line in folds[:2]]
    assert [line[0] for line in means] == ["val/top1 0.4000 ± 0.1000", "val/top1 0.3000 ± 0.2646"]
    assert [line[-1] for line in means] == ["rate=2", "rate=1"]
    names = "3-0 1-2 2-2 2-1 2-0 1-1 1-0"
    assert " ".join(line.split()[3] for line in folds[2:-1]) == names
    by_loss = listed(tmp_path, "sort=val/loss")
    assert any("val/loss 0.6000 ± 0.1000" in line for line in by_loss)


def test_a_damaged_run_is_named_and_the_others_are_listed(tmp_path, capsys) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, {"val/top1": 0.5})
    for content in ("{", "[1]", ""):
        (tmp_path / "a" / "config.yaml").write_text(content)
        assert [line.split()[3] for line in listed(tmp_path)] == ["b"]
        assert f"{tmp_path}/a is left out" in capsys.readouterr().err


def test_a_mean_is_of_the_folds_that_have_ended_and_of_no_other_runs(tmp_path) -> None:
    for fold, value in enumerate((0.2, 0.4, 0.9)):
        config = f"layout: table, fold: {fold}"
        settings: dict[str, Any] = {"data.fold": fold}
        write_run(tmp_path / f"{fold}", {"val/top1": value}, config, **settings)
    (tmp_path / "2" / "summary.json").unlink()
    write_run(tmp_path / "whole", {"val/top1": 0.7}, "layout: table")
    [mean] = [line for line in listed(tmp_path) if "mean of" in line]
    assert mean.startswith("val/top1 0.3000 ± 0.1414 ")
    assert "mean of 2 folds" in mean
