"""`make gpu-check` on a machine without a GPU: the same parts, with stand-ins and short limits."""

import csv
from pathlib import Path

import pytest

from benchmarks import REPOSITORY, gpu_check
from benchmarks.gpu_check import FAILED, MEASURED, NOT_CHECKED, PASSED, Check


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "checks.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_check_goes_on_after_parts_that_fail_or_take_too_long(tmp_path: Path) -> None:
    parts = {
        ("versions", "", 60): PASSED,
        ("guard", "no_test_has_this_name", 60): FAILED,
        ("entry points", "", 1): FAILED,
        ("batches", "", 0.1): FAILED,
    }
    for part, only, limit_s in parts:
        gpu_check.run_part(Check(tmp_path, part, only, small=True), limit_s)
    rows = rows_of(tmp_path)
    ends = [row["outcome"] for row in rows if row["what"] == "all of it"]
    assert ends == list(parts.values())
    assert {row["outcome"] for row in rows if row["what"] == "GPU"} == {NOT_CHECKED}
    assert "stopped after 1 s" in rows[-2]["note"]
    gpu_check.write_table(tmp_path)
    table = (tmp_path / "checks.md").read_text().splitlines()
    assert "3 failed" in table[2]
    assert all("| failed |" in line for line in table[6:9])
    assert len(table) == 6 + len(rows)


@pytest.mark.slow
def test_speeds_and_utilisation_have_stand_ins(tmp_path: Path) -> None:
    gpu_check.speeds(Check(tmp_path, "speeds", small=True))
    gpu_check.utilisation(Check(tmp_path, "utilisation", small=True))
    rows = rows_of(tmp_path)
    for row in rows:
        assert row["outcome"] == (NOT_CHECKED if row["what"].startswith("float16") else MEASURED)
    assert len(rows) == 3 * len(gpu_check.SPEEDS) + 2
    assert (tmp_path / "utilisation.csv").read_text().startswith("way,seconds,percent\n")


def test_the_parts_choose_tests_that_exist() -> None:
    """`runs` is whatever no other part chooses."""
    text = (REPOSITORY / "tests" / "test_gpu.py").read_text()
    names = " ".join(line for line in text.splitlines() if line.startswith("def test"))
    chosen = gpu_check.RUNS.removeprefix("not (").removesuffix(")").split(" or ")
    assert all(word in names for word in chosen)
