"""Every benchmark runs at its smallest size; its report shows the results. No speed is tested."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from PIL import Image

from benchmarks import REPOSITORY, bottleneck, readme, records, report, simulate
from benchmarks.__main__ import BENCHMARKS, function_of, main
from benchmarks.records import Measurement
from benchmarks.run import Run
from benchmarks.server import serve
from benchmarks.tests.examples import TINY, row

LIGHT = ("model.kwargs.width=2", "global_batch_size=16")
RESULTS = REPOSITORY / "benchmarks" / "results"
# benchmark -> overrides, cases, and the argument of its function that makes it small
RUNS: dict[str, tuple[Sequence[str], Sequence[str], Any]] = {
    "alternatives": (["global_batch_size=2"], ["pairs"], None),
    "workers": ([], [], 1),
    "worker_costs": (["global_batch_size=2"], ["caltech256"], 20),
    "out_of_band": (["global_batch_size=2", "data.resize=[32,32]"], ["lowlight"], None),
    "entry_points": (LIGHT, [], ["train.py"]),
    "bottleneck": (LIGHT, [], [("model.channels_last=true",)]),
    "loop_overhead": (LIGHT, [], None),
    "scale": ([], [], None),
    "shuffle": ([], [], None),
    "augmentations": ([], [], ["data.randaugment=[2,9]", "data.mixup=0.2"]),
    "agreement": ([], [], [2]),
    "gpu": ([], [], None),
}


def test_the_command_line_lists_benchmarks_and_refuses_what_is_none(capsys) -> None:
    with pytest.raises(SystemExit) as shown:
        main(["--help"])
    assert not shown.value.code
    assert set(BENCHMARKS) <= set(capsys.readouterr().out.split())
    for argument in ("repeats=0", "loader", "samples=many", "cases=here"):
        with pytest.raises(SystemExit) as refused:
            main([argument])
        line = str(refused.value.code)
        assert argument.partition("=")[2] in line
        assert len(line.splitlines()) == 1


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_and_draws_its_report(name: str, tmp_path: Path, data_dir: Path) -> None:
    overrides, cases, small = RUNS[name]
    run = Run(tmp_path, TINY, tuple(overrides), tuple(cases), data_dir)
    arguments = [] if small is None else [small]
    function_of(name)(run, *arguments)
    rows = records.read(tmp_path / f"{name}.csv")
    missing = ("not installed", "no module", "needs")  # of what is compared, not of this project
    for line in rows:
        assert line.repeats or any(word in line.note.lower() for word in missing), line
    assert report.draw(tmp_path).read_text().count("\n## ") == 1


def test_the_server_answers_late_with_ranges_and_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / "bucket" / "a b").mkdir(parents=True)
    (tmp_path / "bucket" / "a b" / "c").write_bytes(b"0123456789")
    with serve(tmp_path, 0.1, set(records.cores())) as address:

        def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
            start, url = time.perf_counter(), f"{address}/bucket{path}"
            with urlopen(Request(url, method=method, headers=headers)) as answer:
                found = answer.status, answer.read()
            assert time.perf_counter() - start >= 0.1
            assert method == "GET" or answer.headers["Content-Length"] == "10"
            return found

        assert ask("/a%20b/c") == (200, b"0123456789")
        assert ask("/a%20b/c", Range="bytes=2-4") == (206, b"234")
        assert ask("/a%20b/c", Range="bytes=8-40") == (206, b"89")
        assert ask("/a%20b/c", method="HEAD") == (200, b"")
        assert b"<Key>a b/c</Key><Size>10</Size>" in ask("?list-type=2&prefix=a%20b/")[1]
        with pytest.raises(HTTPError, match="404"):
            ask("/d")


IDEAL = simulate.Cluster(
    *(0.1, [0.9, 1.0, 1.1], 1e8, 1e-5, 1e10, 0.0, 0.0, 10.0, 0.0), restart_s=0.0, mtbf_s=1e6
)


def test_the_simulated_parts_of_a_step_are_those_of_the_formulas() -> None:
    ring_s, tree_s = 2 * 3 * (1e-5 + 2.5e7 / 1e10), 2 * 2 * (1e-5 + 4 / 1e10)
    assert simulate.all_reduce_s(IDEAL, 4, 1e8) == pytest.approx(ring_s)
    assert simulate.all_reduce_s(IDEAL, 4, 4) == pytest.approx(tree_s)
    assert simulate.all_reduce_s(replace(IDEAL, cores=2), 4, 1e8) == pytest.approx(2 * ring_s)
    two = simulate.parts_of_step(replace(IDEAL, hidden_s=0.004), 2)
    # The slower of two: 1.1 in five of nine pairs, 1.0 in three, 0.9 in one.
    assert two["slowest rank"] == pytest.approx(0.1 * (9.4 / 9 - 1))
    assert two["all-reduce"] == pytest.approx(2 * (1e-5 + 5e7 / 1e10) - 0.004)


def test_the_best_interval_is_near_youngs_and_keeps_what_theory_says() -> None:
    for count in (1, 16, 64):
        best, young = simulate.best_interval_s(IDEAL, count), simulate.young_s(IDEAL, count)
        assert 0.5 < best / young < 2
        lost = 1 - simulate.useful_share(IDEAL, count, young)
        mtbf_s = IDEAL.mtbf_s / count
        assert lost == pytest.approx(10 / young + young / 2 / mtbf_s, rel=0.1)


IN_MS = {"quantity": "time per step", "unit": "ms", "epoch_size": 0}
ON_TWO = {"settings": "loader=pytorch", "num_devices": 2, "num_threads": 0}
ON_ONE = {**ON_TWO, "num_devices": 1}
LOADING, TRAINING = ({"case": f"caltech256, {mode}"} for mode in ("loading only", "training"))
# benchmark -> its rows; then by case and column the cells of the report's table
FIXED: dict[str, tuple[list[Measurement], dict[str, dict[str, list[str]]]]] = {
    "alternatives": (
        [
            row("PIL + DataLoader", "50;40;50"),
            row("limit: decoding alone", "125;125;125"),
            row("loader=pytorch", "100;100;100"),
            row("loader=pytorch", "2.5", quantity="pixel difference", unit="of 255"),
            row("SPDL", "", note="not measured: spdl is not installed"),
        ],
        {
            "caltech256": {
                "subject": ["limit: decoding alone", "loader=pytorch", "PIL + DataLoader", "SPDL"],
                "against PIL + DataLoader": ["2.5x (2.5 to 3.12)", "2x (2 to 2.5)", "1x", ""],
                "share of the limit": ["100 %", "80 %", "40 %", ""],
                "pixel difference (of 255)": ["", "2.5", "", ""],
                "epoch": ["4.08 min", "5.1 min", "10.2 min", ""],
                "note": ["", "", "", "not measured: spdl is not installed"],
            }
        },
    ),
    "out_of_band": (
        [
            row("pack", "30", quantity="packing", unit="s", note="1000 images, 9 MiB"),
            *(row(**LOADING), row("loader=packed", "900;1000;1100", **LOADING)),
            *(row(**TRAINING), row("loader=packed", "50;50;50", **TRAINING)),
        ],
        {
            "caltech256": {"packing (s)": ["30"]},
            "caltech256, loading only": {
                "against loader=pytorch": ["1x", "10x (10 to 10)"],
                "packing is paid for after (epochs)": ["", "3.33"],
            },
            "caltech256, training": {"packing is paid for after (epochs)": ["", "never"]},
        },
    ),
    "entry_points": (
        [
            *(row("train.py", "100", **ON_ONE), row("train_ddp.py", "90", **ON_ONE)),
            row("train_ddp.py", "171", **ON_TWO),
            row("train_ddp.py", "12.5", quantity="data wait", unit="%", **ON_TWO),
        ],
        {
            "caltech256": {
                "scaling efficiency": ["", "", "95 %"],
                "speed per device against train.py": ["", "90 %", "86 %"],
                "data wait (%)": ["", "", "12.5"],
            }
        },
    ),
    "loop_overhead": (
        [
            *(row("bare loop", "10;8;10", **IN_MS), row("train.py", "10.1;8;10.2", **IN_MS)),
            row("x", "", **IN_MS),
            row("plain/train.py", "10;10", case="digits", **IN_MS),
            row("train.py", "9;9", case="digits", **IN_MS),
        ],
        {
            "caltech256": {"over the bare loop (%)": ["", "1 (0 to 2)", ""]},
            "digits": {"over the bare loop (%)": ["", "-10 (-10 to -10)"]},
        },
    ),
}


@pytest.mark.parametrize("benchmark", FIXED)
def test_the_report_shows_a_picture_and_tables_with_what_follows_from_the_rows(
    tmp_path: Path, benchmark: str
) -> None:
    rows, expected = FIXED[benchmark]
    tables = report.tables(benchmark, rows)
    for case, columns in expected.items():
        header, *lines = tables[case]
        for name, cells in columns.items():
            assert [line[header.index(name)] for line in lines] == cells, name
    records.append(tmp_path / f"{benchmark}.csv", rows)
    text = report.draw(tmp_path).read_text()
    assert all(report.markdown(table) in text for table in tables.values())
    assert f"]({benchmark}.png)" in text
    pixels = np.asarray(Image.open(tmp_path / f"{benchmark}.png").convert("L"))
    assert min(pixels.shape) > 100
    assert 0.005 < (pixels < 250).mean() < 0.9, "blank"


def test_verdict_names_the_largest_part_and_only_what_is_reliably_faster() -> None:
    names = {"given": bottleneck.GIVEN, "synthetic": bottleneck.SYNTHETIC}
    names |= {"alone": bottleneck.ALONE, "dali": "loader=dali"}

    def speeds(**samples: str) -> dict[str, Measurement]:
        devices = {key: 1 if key == "alone" else 2 for key in samples}
        return {
            names[key]: row(names[key], text, num_devices=devices[key])
            for key, text in samples.items()
        }

    loading = speeds(given="10;10", synthetic="40;40", alone="25;25")
    tried = speeds(given="10;10", dali="20;30")
    assert bottleneck.verdict(loading, tried) == ("input", 0.75, "loader=dali", 2.5)
    assert bottleneck.verdict(loading, speeds(given="10;10", dali="9;30"))[2:] == ("", 1)
    averaging = speeds(given="38;38", synthetic="40;40", alone="80;80")
    assert bottleneck.verdict(averaging, {})[:2] == ("communication", pytest.approx(0.7125))
    computing = speeds(given="39;39", synthetic="40;40", alone="20;20")
    assert bottleneck.verdict(computing, {})[:2] == ("compute", pytest.approx(0.975))
    assert bottleneck.noise(loading, tried) == 1
    assert bottleneck.noise(loading, speeds(given="20;20", dali="20;30")) == 2
    assert bottleneck.noise(speeds(given="30;30", synthetic="20;20"), {}) == 1.5


@pytest.mark.parametrize("folder", sorted(path.name for path in RESULTS.iterdir()))
def test_the_committed_report_is_that_of_its_csv_files(folder: str) -> None:
    text = (RESULTS / folder / "report.md").read_text()
    for path in (RESULTS / folder).glob("*.csv"):
        if path.stem not in report.TITLES:
            continue
        rows = records.latest(path)
        for table in report.tables(path.stem, rows).values():
            assert report.markdown(table) in text, f"run python -m benchmarks.report {folder}"


def test_the_page_shows_what_was_measured() -> None:
    text = readme.PAGE.read_text()
    [folder] = set(re.findall(r"\(../(benchmarks/results/[\w.-]+)/\w+\.png\)", text))
    assert text == readme.with_excerpt(text, REPOSITORY / folder), (
        f"run python -m benchmarks.readme {folder}"
    )
    gpu = set(re.findall(r"(benchmarks/results/[\w.-]+)/gpu\.csv", text))
    assert text == readme.with_gpu(text, REPOSITORY / max(gpu))
    for name in readme.PICTURES:
        assert (REPOSITORY / folder / name).stat().st_size > 1000
