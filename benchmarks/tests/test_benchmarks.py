"""Every benchmark runs at its smallest size, and tables show its rows. No speed is tested."""

from pathlib import Path

import pytest

from benchmarks import REPOSITORY, tables
from benchmarks.__main__ import main, peers
from benchmarks.compare import CASES
from benchmarks.compare import main as compare
from benchmarks.loop_overhead import LOOPS
from benchmarks.loop_overhead import main as measure_loops
from benchmarks.records import Subject, read, record
from tests.helpers import refused

DATE = "2025-01-31T12:00:00+00:00"
SPEED, STEP_TIME = ("speed", "images/s"), ("time per step", "ms")


def test_the_command_line_refuses_what_is_no_benchmark(capsys) -> None:
    main(["--help"])
    assert "loop_overhead" in capsys.readouterr().out
    for argument in ("bottleneck", "repeats=many", "seconds=x"):
        with refused(argument.partition("=")[2] or argument):
            main([argument])
    with refused("cases=here", "caltech256"):
        main(["compare", "cases=here"])


def test_packages_that_are_not_installed_are_named_with_the_command_that_installs_them() -> None:
    said = peers({"json": "json", "no_such.module": "no-such", "json.no_such": "jsons"})
    assert "not measured: no-such, jsons." in said
    assert "/pip install -r requirements.txt no-such jsons && " in said
    assert peers({"json": "json"}) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pairs"])
def test_loaders_are_compared(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cpu.csv"
    compare(path, tmp_path / "data", [name], repeats=1, window_s=0.01, warmup_s=0)
    rows = read(path)
    assert {"loader=pytorch", "loader=dali"} <= {row.subject for row in rows}
    for row in rows:
        assert row.case == CASES[name].title
        assert row.repeats or "not installed" in row.note, row
    assert f"| {rows[0].case} | speed ({CASES[name].unit}) |" in tables.tables(rows)


@pytest.mark.slow
def test_loops_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "cpu.csv"
    measure_loops(path, 1, 0.01, ["model.kwargs.width=2", "global_batch_size=16"])
    rows = read(path)
    assert {row.subject for row in rows} == {*LOOPS}
    for row in rows:
        assert row.repeats or row.note.startswith("not measured: ModuleNotFoundError"), row.note


def write(path: Path, benchmark: str, quantity: tuple[str, str], **samples: list[float]) -> None:
    for name, values in samples.items():
        subject = Subject(name.replace("limit", tables.LIMIT).replace("pack", "loader=packed"))
        record(path, benchmark, "JPEGs", subject, {quantity: values}, "", DATE)


def test_a_table_of_loaders_has_ratios_within_rounds_the_fastest_first(tmp_path: Path) -> None:
    path = tmp_path / "cpu.csv"
    loaders: dict[str, list[float]] = {"PIL": [50, 40, 50], "ours": [100, 100, 100]}
    write(path, "compare", SPEED, **loaders, limit=[125, 125, 125], pack=[400, 400, 400], none=[])
    assert tables.loader_table("JPEGs", read(path)) == [
        ["JPEGs", "speed (images/s)", "against PIL"],
        ["loader=packed", "400", "8x (8 to 10)"],
        ["limit: decoding alone", "125", "2.5x (2.5 to 3.12)"],
        ["ours", "100", "2x (2 to 2.5)"],
        ["PIL", "50", "1x"],
    ]


def test_a_table_of_loops_has_what_they_cost_beside_the_first(tmp_path: Path) -> None:
    path = tmp_path / "cpu.csv"
    write(path, "loop_overhead", STEP_TIME, bare=[10, 8, 10], train=[10.1, 8, 10.2], none=[])
    assert tables.loop_table("digits", read(path)) == [
        ["digits", "time per step (ms)", "over bare (%)"],
        ["bare", "10", ""],
        ["train", "10.1", "1 (0 to 2)"],
    ]


def test_the_page_shows_what_was_measured_and_readme_the_commit_of_its_gpu_numbers() -> None:
    text = tables.PAGE.read_text()
    for name in ("gpu", "cpu"):
        assert text == tables.with_tables(text, name), "run python -m benchmarks.tables"
    rows = read(tables.RESULTS / "gpu.csv")
    readme = (REPOSITORY / "README.md").read_text()
    assert f"at commit {rows[0].commit}" in readme
    speeds = {
        row.subject: row.median
        for row in rows
        if (row.case, row.quantity) == ("ResNet-50", tables.SPEED)
    }
    for name in ("loader=pytorch", "torchvision ImageFolder + DataLoader"):
        assert f"{speeds[name]:,.0f}" in readme
