"""CSV files of results: one typed row for each figure, written as soon as it is measured."""

import csv
import functools
import importlib.metadata
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks import REPOSITORY

PACKAGES = (
    *("torch", "torchvision", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "numpy", "pillow"),
    *("simplejpeg", "tifffile", "webdataset", "litdata", "lightning"),
)
CONFIDENCE = 0.95


class Subject(NamedTuple):
    """A measured program and its parallelism."""

    name: str
    num_workers: int = 0
    num_threads: int = 0

    def __str__(self) -> str:
        counts = {"worker": self.num_workers, "thread": self.num_threads}
        shown = [f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count]
        return ", ".join([self.name, *shown])


class Summary(NamedTuple):
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """One row: a figure, its settings, and the machine."""

    benchmark: str
    case: str
    """Data set or configuration."""
    subject: str
    quantity: str
    """Such as `speed` or `data wait`."""
    num_workers: int
    num_threads: int
    unit: str
    median: float
    """Of the samples, nan if nothing was measured."""
    low: float
    """Lower end of the median's 95 % interval; see `summarise`."""
    high: float
    repeats: int
    """Number of samples; 0: not measured, for the reason in `note`."""
    samples: str
    """Separated by `;`. The i-th ones of rows of the same `date` are a round."""
    note: str
    cpu: str
    cores: int
    memory_gib: float
    gpu: str
    """Number and model; empty without one."""
    versions: str
    commit: str
    """Of the repository; ends with `-dirty` if files were changed."""
    date: str
    """ISO 8601, in UTC."""

    @property
    def full_subject(self) -> Subject:
        return Subject(self.subject, self.num_workers, self.num_threads)

    @property
    def values(self) -> list[float]:
        """Samples as numbers."""
        return [float(sample) for sample in self.samples.split(";") if sample]


COLUMNS = [field.name for field in fields(Measurement)]
NUMBERS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(("num_workers", "num_threads", "repeats", "cores"), int),
    **dict.fromkeys(("median", "low", "high", "memory_gib"), float),
}
"""Columns that are no text."""


def record(
    path: Path,
    benchmark: str,
    case: str,
    subject: Subject,
    figures: dict[tuple[str, str], list[float]],
    note: str = "",
    date: str = "",
) -> None:
    """Append a row for the samples of each (quantity, unit), and print it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        for (quantity, unit), values in figures.items():
            median, low, high = (float(f"{value:.5g}") for value in summarise(values))
            row = Measurement(
                benchmark=benchmark,
                case=case,
                subject=subject.name,
                quantity=quantity,
                num_workers=subject.num_workers,
                num_threads=subject.num_threads,
                unit=unit,
                median=median,
                low=low,
                high=high,
                repeats=len(values),
                samples=";".join(f"{value:.6g}" for value in values),
                note=" ".join(note.split()),
                date=date or now(),
                **machine(),
            )
            writer.writerow(asdict(row).values())
            print(f"{case}: {subject}: {format_interval(row) or note} {unit}", flush=True)


def read(path: Path) -> list[Measurement]:
    """Read the newest row of each figure, in the order of first appearance.

    Raises:
        ValueError: a column is missing or unknown, or has a value of the wrong type.
    """
    rows: dict[tuple[Any, ...], Measurement] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if sorted(reader.fieldnames or []) != sorted(COLUMNS):
            raise ValueError(f"{path}: its columns are not those of benchmarks/records.py")
        for values in reader:
            typed: dict[str, Any] = dict(values)
            for name, kind in NUMBERS.items():
                typed[name] = kind(typed[name])
            row = Measurement(**typed)
            rows[row.benchmark, row.case, row.full_subject, row.quantity] = row
    return list(rows.values())


def summarise(samples: Iterable[float]) -> Summary:
    """Median and confidence interval from order statistics, for any distribution; nan if empty.

    The interval from the k-th smallest to the k-th largest of n samples contains the true median
    with probability 1 - 2 P(X < k), where X is binomial with n and 1/2 (David and Nagaraja 2003,
    "Order statistics", section 7.1). The narrowest interval with at least 95 % is returned. This
    needs 6 samples; with fewer, it is their range, with probability 1 - 2^(1 - n).
    """
    ordered = sorted(samples)
    count = len(ordered)
    if not ordered:
        return Summary(math.nan, math.nan, math.nan)
    k = 1
    while k < (count + 1) // 2:
        outside = 2 * sum(math.comb(count, i) for i in range(k + 1)) / 2**count
        if 1 - outside < CONFIDENCE:
            break
        k += 1
    return Summary(statistics.median(ordered), ordered[k - 1], ordered[count - k])


def ratio(row: Measurement, reference: Measurement) -> Summary | None:
    """Return the ratio of two measurements, taken in each round and then summarised; None if they
    were not measured in the same rounds."""
    if not row.repeats or (row.date, row.repeats) != (reference.date, reference.repeats):
        return None
    return summarise(a / b for a, b in zip(row.values, reference.values, strict=True))


@functools.cache
def machine() -> dict[str, Any]:
    """Return the columns that describe this machine, package versions and commit."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    gpu = ""
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    with suppress(OSError):  # without git
        commit = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    versions = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return {
        "cpu": found[1].strip() if found else platform.processor(),
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu,
        "versions": ", ".join(versions),
        "commit": commit or "unknown",
    }


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def format_number(value: float) -> str:
    """Three significant digits; thousands separated by commas."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_interval(found: Measurement | Summary, unit: str = "") -> str:
    """Text such as `1,840 (1,800 to 1,890)`; the median alone for one sample, empty for none."""
    if math.isnan(found.median):
        return ""
    text = f"{format_number(found.median)}{unit}"
    if found.low == found.high:
        return text
    return f"{text} ({format_number(found.low)} to {format_number(found.high)})"
