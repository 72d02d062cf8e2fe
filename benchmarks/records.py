"""CSV files of results: one typed row per figure, written as soon as it is measured."""

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
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks import REPOSITORY
from conf.files import write_atomically

PACKAGES = (
    *("torch", "torchvision", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "numpy", "pillow"),
    *("simplejpeg", "tifffile", "torchcodec"),
    *("spdl", "webdataset", "litdata", "mosaicml-streaming", "obstore", "lightning", "accelerate"),
)
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Subject:
    """A measured program with its settings, as identified by the columns of a row."""

    name: str
    num_workers: int = 0
    num_threads: int = 0
    num_devices: int = 1
    settings: str = ""

    @property
    def parallelism(self) -> str:
        """Text such as `2 workers, 1 thread`; empty without such settings."""
        counts = {"worker": self.num_workers, "thread": self.num_threads}
        if self.num_devices > 1:
            counts["device"] = self.num_devices
        return ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n)

    def __str__(self) -> str:
        return ", ".join(part for part in (self.name, self.settings, self.parallelism) if part)


@dataclass(frozen=True)
class Measurement:
    """One row: a figure, its settings, and the machine."""

    benchmark: str
    """Name of the benchmark and of its CSV file."""

    case: str
    """Data set or configuration of the measurement."""

    subject: str
    """Name of the measured program, such as `loader=pytorch`."""

    quantity: str
    """Kind of figure, such as `speed` or `data wait`."""

    num_workers: int
    """Worker processes per device."""

    num_threads: int
    """Loading threads per device; 0 if there is no such setting."""

    num_devices: int
    """Number of GPUs or, without GPUs, of processes."""

    settings: str
    """Other settings, as `key=value` separated by spaces."""

    unit: str
    """Unit of the figures, such as `images/s`."""

    median: float
    """Median of the samples in `unit`; nan if nothing was measured."""

    low: float
    """Lower end of the median's 95 % confidence interval in `unit`; see `summarise`."""

    high: float
    """Upper end of the interval in `unit`."""

    repeats: int
    """Number of samples; 0: not measured, for the reason in `note`."""

    samples: str
    """Samples in `unit`, separated by `;`. The i-th ones of rows of the same `date` are a round."""

    epoch_size: int
    """Samples per epoch of the published data set; 0 if not applicable."""

    note: str
    """Remarks, such as the reason for a missing figure."""

    cpu: str
    """Model of the CPU."""

    cores: int
    """Number of CPU cores available to the process."""

    memory_gib: float
    """Main memory in GiB."""

    gpu: str
    """Number and model of the GPUs; empty without GPUs."""

    versions: str
    """Versions of Python and packages, separated by `, `."""

    commit: str
    """Commit of the repository; ends with `-dirty` if files were changed."""

    date: str
    """End of the group of measurements, ISO 8601 in UTC."""

    @property
    def full_subject(self) -> Subject:
        return Subject(
            *(self.subject, self.num_workers, self.num_threads, self.num_devices, self.settings)
        )

    @property
    def key(self) -> tuple[str, Subject, str]:
        """Identity of the measurement, the same when it is repeated."""
        return self.case, self.full_subject, self.quantity

    @property
    def summary(self) -> "Summary":
        return Summary(self.median, self.low, self.high)

    @property
    def values(self) -> list[float]:
        """Samples as numbers."""
        return [float(sample) for sample in self.samples.split(";") if sample]


COLUMNS = [field.name for field in fields(Measurement)]


def append(path: Path, rows: Iterable[Measurement]) -> None:
    """Append rows to a file, which is replaced atomically.

    Raises:
        ValueError: the file has other columns.
    """
    old = read(path) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary:
        _write(temporary, [*old, *rows])


def _write(path: Path, rows: Iterable[Measurement]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            values = asdict(row).values()
            writer.writerow(" ".join(v.split()) if isinstance(v, str) else v for v in values)


def read(path: Path) -> list[Measurement]:
    """Read all rows of a file, oldest first.

    Raises:
        ValueError: a column is missing, unknown, or has a value of the wrong type.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        header = list(reader.fieldnames or [])
        if sorted(header) != sorted(COLUMNS):
            raise ValueError(
                f"{path}: columns {sorted(set(header) - set(COLUMNS))} are unknown and "
                f"{sorted(set(COLUMNS) - set(header))} missing; rename them to those of "
                "benchmarks/records.py, or move the file away and measure again"
            )
        rows = []
        for line, values in enumerate(reader, start=2):
            try:
                rows.append(
                    Measurement(**{f.name: f.type(values[f.name]) for f in fields(Measurement)})  # type: ignore[operator]
                )
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {line}: {error}; correct or delete it") from error
    return rows


def latest(path: Path) -> list[Measurement]:
    """Newest row of each measurement, from any commit, in the order of first appearance."""
    return list({row.key: row for row in read(path)}.values())


class Summary(NamedTuple):
    median: float
    low: float
    high: float


def summarise(samples: list[float]) -> Summary:
    """Median and confidence interval from order statistics, for any distribution; nan if empty.

    The interval from the k-th smallest to the k-th largest of n samples contains the true median
    with probability 1 - 2 P(X < k), where X is binomial with n and 1/2 (David and Nagaraja 2003,
    "Order statistics", section 7.1). The narrowest interval with at least 95 % is returned. This
    needs 6 samples; with fewer, it is their range, with probability 1 - 2^(1 - n).
    """
    if not samples:
        return Summary(math.nan, math.nan, math.nan)
    ordered, count = sorted(samples), len(samples)
    k = 1
    while k < (count + 1) // 2:
        outside = 2 * sum(math.comb(count, i) for i in range(k + 1)) / 2**count
        if 1 - outside < CONFIDENCE:
            break
        k += 1
    return Summary(statistics.median(ordered), ordered[k - 1], ordered[count - k])


def ratio(row: Measurement | None, reference: Measurement | None) -> Summary | None:
    """Ratio of two measurements, taken in each round and then summarised.

    None if one is missing or they were not measured in the same rounds.
    """
    if row is None or reference is None or not row.repeats:
        return None
    if (row.date, row.repeats) != (reference.date, reference.repeats):
        return None
    return summarise([a / b for a, b in zip(row.values, reference.values, strict=True)])


@functools.cache
def machine() -> dict[str, Any]:
    """Columns that describe this machine, package versions and commit."""
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
        "cpu": found[1].strip() if found else platform.processor() or platform.machine(),
        "cores": len(cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu,
        "versions": ", ".join(versions),
        "commit": commit or "unknown",
    }


def cores() -> list[int]:
    """Numbers of the CPU cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def machine_name() -> str:
    """Short name for folders, such as `intel-xeon-processor-2-cores` or `1-x-nvidia-h200`."""
    name = machine()["gpu"] or f"{machine()['cpu']} {machine()['cores']} cores"
    name = re.sub(r"\((r|tm)\)|@.*?(?= \d+ cores|$)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
