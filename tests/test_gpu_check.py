"""`make gpu-check` on a machine without a GPU: the same parts, with stand-ins and short limits."""

import csv
from pathlib import Path

import psutil

from benchmarks import gpu_check
from benchmarks.gpu_check import FAILED, MEASURED, NOT_CHECKED, PASSED, Check


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "checks.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_check_goes_on_after_parts_that_fail_or_take_too_long(tmp_path: Path) -> None:
    for part, only, limit_s in (
        ("versions", "", 60),
        ("guard", "sgd and float32", 60),
        ("guard", "no_test_has_this_name", 60),
        ("entry points", "", 1),
        ("batches", "", 0.1),
    ):
        gpu_check.run_part(Check(tmp_path, part, only, small=True), limit_s)
    rows = rows_of(tmp_path)
    ends = [(row["part"], row["outcome"]) for row in rows if row["what"] == "all of it"]
    expected = [PASSED, PASSED, FAILED, FAILED, FAILED]
    assert ends == list(
        zip(["versions", "guard", "guard", "entry points", "batches"], expected, strict=True)
    )
    assert {row["outcome"] for row in rows if row["what"] == "GPU"} == {NOT_CHECKED}
    tests = [row["outcome"] for row in rows if "statistics_untouched" in row["what"]]
    assert tests == [PASSED, NOT_CHECKED]  # on the CPU, on CUDA
    assert "stopped after 1 s" in rows[-2]["note"]
    assert "pytest ended with" in (tmp_path / "guard.txt").read_text()
    gpu_check.write_table(tmp_path)
    table = (tmp_path / "checks.md").read_text().splitlines()
    assert "3 failed" in table[2]
    assert all("| failed |" in line for line in table[6:9])
    assert len(table) == 6 + len(rows)
    of_the_check = {"epochs=1000", "max_steps=2"}
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(of_the_check <= set(command) for command in commands)


def test_speeds_and_utilisation_have_stand_ins(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where data is generated
    gpu_check.speeds(Check(tmp_path, "speeds", small=True))
    gpu_check.utilisation(Check(tmp_path, "utilisation", small=True))
    rows = rows_of(tmp_path)
    speeds = {row["what"]: row["outcome"] for row in rows if row["part"] == "speeds"}
    assert len(speeds) == 3 * len(gpu_check.SPEEDS)
    assert all(
        outcome == (NOT_CHECKED if what.startswith("float16") else MEASURED)
        for what, outcome in speeds.items()
    )
    assert [row["outcome"] for row in rows[-2:]] == [MEASURED, MEASURED]
    assert (tmp_path / "utilisation.csv").read_text().startswith("way,seconds,percent\n")


def test_the_parts_choose_tests_that_there_are() -> None:
    """`runs` is whatever no other part chooses."""
    text = (Path(__file__).parent / "test_gpu.py").read_text()
    names = " ".join(line for line in text.splitlines() if line.startswith("def test"))
    chosen = gpu_check.RUNS.removeprefix("not (").removesuffix(")").split(" or ")
    assert all(word in names for word in chosen)
