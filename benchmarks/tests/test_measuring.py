"""Programs take turns; figures are what they claim; rows are read as they were written."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import records
from benchmarks.measure import Workload, measure
from benchmarks.records import Subject, Summary, ratio, summarise
from benchmarks.tests import programs

SPEED = ("speed", "images/s")


def test_a_speed_is_items_by_seconds_in_every_round() -> None:
    """Of programs that sleep, and so cannot be faster; the first piece of work is warm-up."""
    sleeping = {items: partial(programs.sleep, 0.02, items) for items in (1, 3)}
    speeds = measure(sleeping, 0, 0.1, 2)
    for items, found in speeds.items():
        assert len(found) == 2
        assert all(0 < float(speed) <= items / 0.02 for speed in found)


def test_a_program_that_cannot_begin_has_a_reason_and_one_that_fails_ends_the_measurement() -> None:
    good = partial(programs.sleep, 0.01, 1)
    found = measure({"LitData": programs.refuse, "good": good}, 0, 0.02, 2)
    assert found["LitData"] == "ModuleNotFoundError: litdata is not installed"
    assert len(found["good"]) == 2
    bad_programs: dict[Workload, str] = {
        programs.fail_later: "one.py",
        programs.die: "exit code 3",
    }
    for bad, reason in bad_programs.items():
        with pytest.raises(RuntimeError, match=rf"(?s)bad.*{reason}"):
            measure({"good": good, "bad": bad}, 0, 0.02, 1)


def test_interval_is_the_narrowest_pair_of_order_statistics_with_95_percent() -> None:
    assert summarise([3.0]) == Summary(3, 3, 3)
    assert summarise([4.0, 1, 3, 2]) == Summary(2.5, 1, 4)
    assert summarise(range(1, 9)) == Summary(4.5, 1, 8)  # 99.2 %; 2 to 7 would be 93.0 %
    assert summarise(range(1, 10)) == Summary(5, 2, 8)  # 96.1 %
    random = np.random.default_rng(0)
    inside = [
        low <= 0 <= high
        for _, low, high in (summarise(random.standard_cauchy(20)) for _ in range(1000))
    ]
    assert 0.94 < np.mean(inside) < 0.98  # exactly 95.9 %


def test_rows_are_read_as_they_were_written_and_the_newest_counts(tmp_path: Path) -> None:
    path = tmp_path / "cpu.csv"
    written = [
        ("PIL", [2.0], "", "2025-01-01"),
        ("ours", [8.0, 2, 3], 'a "quoted", note', "2025-01-02"),
        ("none", [], "not installed", "2025-01-02"),
        ("PIL", [1.0, 2, 3], "", "2025-01-02"),
    ]
    for name, samples, note, date in written:
        records.record(path, "compare", "JPEGs", Subject(name, 2), {SPEED: samples}, note, date)
    pil, ours, none = records.read(path)
    assert (pil.values, ours.values) == ([1, 2, 3], [8, 2, 3])
    assert (ours.full_subject, ours.note) == (Subject("ours", 2), 'a "quoted", note')
    assert (none.repeats, none.note, np.isnan(none.median)) == (0, "not installed", True)
    assert ratio(ours, pil) == Summary(1, 1, 8)  # of rounds
    assert ratio(none, pil) is None
    path.write_text(path.read_text().replace("median", "mean", 1))
    with pytest.raises(ValueError, match=r"cpu\.csv: its columns"):
        records.read(path)
