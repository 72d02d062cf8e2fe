"""`make gpu-check` on a machine without a GPU: every part with a stand-in, and time limits."""

import csv
import tarfile
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.records import read
from tests.helpers import FORKSERVER


def outcomes(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with (folder / "checks.csv").open(newline="") as file:
        for _, what, outcome, *_ in csv.reader(file):
            found.setdefault(what, []).append(outcome)
    return found


@pytest.mark.slow
def test_a_dry_run_goes_through_every_part(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "results" / "check"
    assert gpu_check.main(folder, FORKSERVER, patience=100) == 0
    found = outcomes(folder)
    parts = {"versions", "images", "tests", "speeds"}
    runs = {"train", "resnet50-4-checkpoints"}
    runs |= {what for what in found if what.startswith("train_")}
    assert len(runs) == 4
    assert all(found[what][-1] == "passed" for what in parts | runs)
    assert all("measured" in found[what] for what in runs)
    assert found["versions, CUDA"] == ["measured"]
    assert any("sgd-float32-cpu" in what for what in found)
    with tarfile.open(f"{folder}.tar.gz") as archive:
        packed = {Path(name).relative_to("check").name for name in archive.getnames()}
    assert {"checks.csv", "train.txt", "gpu.csv"} <= packed
    speeds = {(row.case, row.subject) for row in read(folder / "gpu.csv")}
    assert {("AlexNet", "loader=dali"), ("ResNet-50", "constant batch")} <= speeds
    assert "work" not in packed
    assert "'speeds': 160" in capsys.readouterr().out
    with pytest.raises(FileExistsError):  # earlier results stay
        gpu_check.main(folder, FORKSERVER)
    assert outcomes(folder) == found


def test_jobs_go_on_after_those_that_fail_or_take_too_long(tmp_path: Path) -> None:
    jobs: list[gpu_check.Job] = [("bad", fail, 0), ("good", partial(pause, 0), 2)]
    gpu_check.run_part(tmp_path, 100, 1, jobs, FORKSERVER)
    gpu_check.run_part(tmp_path, 0.5, 1, [("long", partial(pause, 1000), 0)], FORKSERVER)
    assert outcomes(tmp_path) == {"bad": ["failed"], "good": ["passed"], "long": ["failed"]}
    assert "ZeroDivisionError" in (tmp_path / "checks.csv").read_text()


def fail(folder: Path, what: str) -> None:
    raise ZeroDivisionError(what)


def pause(seconds: float, folder: Path, what: str) -> None:
    time.sleep(seconds)
