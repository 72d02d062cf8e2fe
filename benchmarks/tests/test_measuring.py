"""Workloads are measured in turns; figures are what they claim; rows are stored as measured."""

import itertools
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import REPOSITORY, fresh, records
from benchmarks.interleave import Workload, measure
from benchmarks.records import Subject, Summary, ratio, summarise
from benchmarks.run import Run
from benchmarks.tests import programs
from benchmarks.tests.examples import TINY, row
from tests.helpers import FORKSERVER


def test_a_speed_is_items_by_seconds_in_every_round() -> None:
    """A turn of no length ends with its first piece of work, which is a sleep and some items."""
    rounds: list[str] = []
    num_items = {"one": 1, "two": 2}
    sleeping = {name: partial(programs.sleep, 0.02, items) for name, items in num_items.items()}
    began = time.perf_counter()
    speeds = measure(sleeping, 0, 0, 3, after_round=lambda: rounds.append("round"))
    lasted = time.perf_counter() - began
    assert len(rounds) == len(speeds["one"]) == len(speeds["two"]) == 3
    seconds = {name: items / np.array(speeds[name], float) for name, items in num_items.items()}
    assert min(seconds["one"].min(), seconds["two"].min()) >= 0.02  # no sleep is shorter
    assert seconds["one"].sum() + seconds["two"].sum() < lasted


def test_programs_take_turns_and_only_one_of_them_works(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    working = {name: partial(programs.note_when, tmp_path / name) for name in names}
    measure(working, warmup_s=0, window_s=0.3, repeats=3, slice_s=0.1)
    for process in ("main", "worker"):
        bins = [{int(line) for line in (tmp_path / n / process).open()} for n in names]
        assert all(bins), "did not get its turns"
        shared = {
            moment for own, other in itertools.combinations(bins, 2) for moment in own & other
        }
        assert len(shared) < 0.5 * len(set.union(*bins))


def test_a_program_that_cannot_begin_has_a_reason_and_one_that_fails_ends_the_measurement() -> None:
    good = partial(programs.sleep, 0.01, 1)
    found = measure({"SPDL": programs.refuse, "good": good}, 0, 0.02, 2, (ModuleNotFoundError,))
    assert found["SPDL"] == "spdl is not installed"
    assert len(found["good"]) == 2
    bad_programs: dict[Workload, str] = {
        programs.refuse: "spdl is not installed",
        programs.fail_later: "one.py",
        programs.die: "exit code 3",
    }
    for bad, reason in bad_programs.items():
        refusals = () if bad is programs.refuse else (ModuleNotFoundError,)
        with pytest.raises(RuntimeError, match=rf"(?s)bad.*{reason}"):
            measure({"good": good, "bad": bad}, 0, 0.02, 1, refusals)


MEASURE = """
import sys
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from benchmarks import interleave
from benchmarks.tests import programs
if __name__ == "__main__":
    forkserver.set_forkserver_preload(["benchmarks.interleave"])  # the programs need no more
    forkserver.ensure_running()
    noting = {name: partial(programs.note_when, Path(sys.argv[1], name)) for name in ("a", "b")}
    interleave.measure(noting, 0, 60, 9)
"""


def test_no_stopped_process_outlives_a_killed_measurement(tmp_path: Path) -> None:
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, script, tmp_path], env=environment)
    while not all((tmp_path / name / "worker").exists() for name in ("a", "b")):
        assert process.poll() is None
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    # The fork server, its tracker, and two programs, each with a worker and a guardian.
    assert len(children) == 2 + 2 * 3
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive)


def _hold(count: int) -> str:
    held = bytearray(b"x") * count
    time.sleep(3 * fresh.SAMPLING_S)
    if count == 0:
        raise ValueError("nothing to hold")
    return str(len(held))


def test_a_program_in_a_fresh_process_is_measured_with_its_memory() -> None:
    answer, peak_mb = fresh.run_fresh(partial(_hold, 300_000_000), records.cores(), FORKSERVER)
    assert answer == "300000000"
    assert 300 < peak_mb < 2000
    with pytest.raises(RuntimeError, match="ValueError: nothing to hold"):
        fresh.run_fresh(partial(_hold, 0), records.cores(), FORKSERVER)


def test_interval_is_the_narrowest_pair_of_order_statistics_with_95_percent() -> None:
    assert summarise([3.0]) == Summary(3, 3, 3)
    assert summarise([4.0, 1, 3, 2]) == Summary(2.5, 1, 4)
    assert summarise(list(range(1, 9))) == Summary(4.5, 1, 8)  # 99.2 %; 2 to 7 would be 93.0 %
    assert summarise(list(range(1, 10))) == Summary(5, 2, 8)  # 96.1 %
    random = np.random.default_rng(0)
    inside = [
        low <= 0 <= high
        for _, low, high in (summarise(list(random.standard_cauchy(20))) for _ in range(1000))
    ]
    assert 0.94 < np.mean(inside) < 0.98  # exactly 95.9 %


def test_a_ratio_is_that_of_rounds_and_needs_both_side_by_side() -> None:
    assert ratio(row(samples="2;8;3"), row(samples="1;2;3")) == Summary(2, 1, 4)
    assert ratio(row(samples="2;8;3"), row(samples="1;2;3", date="2025-02-01")) is None
    assert ratio(row(samples="2;8;3"), row(samples="1;2")) is None
    assert ratio(row(samples=""), row(samples="")) is None


def test_rows_are_read_as_they_were_written_and_the_newest_counts(tmp_path: Path) -> None:
    path = tmp_path / "loaders.csv"
    written = [row(), row("PIL + DataLoader", note='a "quoted", note'), row("none", samples="")]
    newer = row(samples="2", commit="other")
    records.append(path, written[:1])
    records.append(path, [*written[1:], newer])
    found = records.read(path)
    assert found[:2] == written[:2]
    assert np.isnan(found[2].median)
    assert records.latest(path)[:2] == [newer, written[1]]


@pytest.mark.parametrize(
    ("old", "new"), [("median", "mean"), ("\n", ",extra\n"), (",8.0,", ",eight,")]
)
def test_wrong_columns_and_types_are_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "loaders.csv"
    records.append(path, [row()])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=new.strip(",\n")) as caught:
        records.read(path)
    assert str(path) in str(caught.value)


def test_an_interrupted_run_goes_on_and_lists_what_cannot_be_had(tmp_path: Path) -> None:
    started = tmp_path / "started.txt"
    once = partial(programs.note_start, started)

    def measure_both(last: Workload) -> None:
        run = Run(tmp_path, TINY)
        run.compare("loaders", "one", {Subject("a"): once, Subject("b"): programs.refuse}, unit="s")
        run.compare("loaders", "two", {Subject("c"): once, Subject("d"): last}, unit="s")

    with pytest.raises(RuntimeError, match="d: its process ended with exit code 1"):
        measure_both(programs.interrupt)
    assert len(started.read_text().split()) == 2
    measure_both(once)
    measure_both(once)
    assert len(started.read_text().split()) == 4
    rows = records.read(tmp_path / "loaders.csv")
    assert [(found.case, found.subject, found.repeats) for found in rows] == [
        *(("one", "a", 1), ("one", "b", 0), ("two", "c", 1), ("two", "d", 1))
    ]
    assert rows[1].note == "not measured: spdl is not installed"


@pytest.mark.parametrize("name", ["nvidia-dali-cuda120", "nvidia-dali-cuda130"])
def test_rows_have_the_version_of_dali_for_any_cuda(name: str, tmp_path, monkeypatch) -> None:
    folder = tmp_path / f"{name.replace('-', '_')}-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert f"{name} 9.9" in records.machine.__wrapped__()["versions"]
