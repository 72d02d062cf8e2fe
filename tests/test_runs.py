"""`runs.py` lists the runs of a folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY, summary_of, train

SMALL = ["model.kwargs.width=8", "log.images=0", "optimizer.warmup_epochs=0", "epochs=1"]


def listed(*arguments: object) -> list[str]:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "runs.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two real runs, one that learnt more, and what is left of one that never ended."""
    root = tmp_path_factory.mktemp("outputs")
    for name, steps in [("short", 5), ("long", 60)]:
        train("train.py", root / "train" / name, *SMALL, f"max_steps={steps}")
    (root / "killed").mkdir()
    (root / "killed" / "config.yaml").write_text("epochs: 4\n")
    start_of_it = {"script": "train.py", "settings": {"optimizer": "sgd"}}
    (root / "killed" / "run.json").write_text(json.dumps(start_of_it))
    (root / "killed" / "summary.json").write_text('{"val/to')
    (root / "no run").mkdir()
    return root


def test_runs_are_listed_with_their_settings_best_metric_and_speed(folder: Path) -> None:
    header, *lines = listed(folder)
    assert header.split() == ["run", "best", "images/s", "settings"]
    assert [line.split()[0] for line in lines] == ["train/long", "train/short", "killed"]
    for line, name, steps in [(lines[0], "long", 60), (lines[1], "short", 5)]:
        summary = summary_of(folder / "train" / name)
        assert f"val/top1 {summary['best']['val/top1']:.4f}" in line
        assert f"{summary['perf/images_per_s']:,.0f}" in line
        assert line.endswith(
            "model.kwargs.width=8 log.images=0 optimizer.warmup_epochs=0.0 epochs=1 "
            f"max_steps={steps}"
        )
        assert "output_dir" not in line
    assert lines[2].split() == ["killed", "-", "-", "optimizer=sgd"]


def test_runs_are_sorted_by_any_metric(folder: Path) -> None:
    def order(key: str) -> list[str]:
        return [line.split()[0] for line in listed(folder, f"sort={key}")[1:]]

    assert order("val/loss") == ["train/long", "train/short", "killed"]
    assert order("name") == ["killed", "train/long", "train/short"]
    speeds = {
        f"train/{name}": summary_of(folder / "train" / name)["perf/images_per_s"]
        for name in ("long", "short")
    }
    assert order("images/s") == [*sorted(speeds, key=lambda run: -speeds[run]), "killed"]
    assert (
        "val/loss 0" in listed(folder, "sort=val/loss")[1]
        or "val/loss 1" in listed(folder, "sort=val/loss")[1]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["no run"], "there are no runs below no run"),
        (
            [".", "sort=val/top3"],
            "sort=val/top3 is unknown; use one of best, images/s, name, val/loss",
        ),
        (["a", "b"], "runs.py takes a folder and sort=KEY, not a b"),
    ],
)
def test_mistakes_end_in_one_clear_error(folder: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "runs.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_a_plain_command_without_torch() -> None:
    code = "import sys, runs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
