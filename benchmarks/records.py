"""The CSV files: one row per measurement, typed, complete and written at once."""

import csv
import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[1]
PACKAGES = [
    *("torch", "torchvision", "nvidia-dali-cuda120", "numpy", "pillow", "simplejpeg", "tifffile"),
    *("spdl", "webdataset", "litdata", "ffcv", "lightning", "accelerate"),
]


@dataclass(frozen=True)
class Measurement:
    """One row: what was measured, the result, and where."""

    benchmark: str
    """Name of the benchmark, which is also the name of its CSV file."""

    case: str
    """What it was measured on, such as the data set."""

    subject: str
    """What was measured, such as `loader=pytorch`."""

    quantity: str
    """The kind of figure, such as `speed` or `data wait`."""

    num_workers: int
    """Worker processes per device."""

    num_threads: int
    """Threads per device that load data; 0 where the subject has no such setting."""

    num_devices: int
    """GPUs, or on a machine without GPUs the processes, that worked together."""

    settings: str
    """All else that was set, as `key=value` separated by blanks."""

    unit: str
    """Unit of the figures, such as `images/s`."""

    median: float
    """Median of the samples in `unit`; nan if nothing was measured."""

    low: float
    """Lower end of the median's 95 % confidence interval in `unit`; see `timing.summarise`."""

    high: float
    """Upper end of the interval in `unit`."""

    repeats: int
    """Number of samples; 0: not measured, `note` says why."""

    samples: str
    """The samples in `unit`, in the order in which they were taken, joined by `;`. Sample i of two
    subjects with the same `date` was taken in the same round, side by side."""

    epoch_size: int
    """Samples of an epoch of the data at its published size; 0 where that has no meaning."""

    note: str
    """What a reader must know of this row, such as why there is no figure."""

    cpu: str
    """Model of the CPU."""

    cores: int
    """CPU cores that this process may use."""

    memory_gib: float
    """Main memory in GiB."""

    gpu: str
    """Number and model of the GPUs; empty without."""

    versions: str
    """Python and the packages that matter, joined by `, `."""

    commit: str
    """Commit of the repository, with `-dirty` if files were changed since."""

    date: str
    """When the group of subjects that this row belongs to was finished, ISO 8601, UTC."""

    @property
    def key(self) -> tuple[str | int, ...]:
        """What makes it the same measurement when it is taken again."""
        return (
            *(self.benchmark, self.case, self.subject, self.quantity),
            *(self.num_workers, self.num_threads, self.num_devices, self.settings, self.commit),
        )

    @property
    def values(self) -> list[float]:
        """The samples as numbers."""
        return [float(sample) for sample in self.samples.split(";") if sample]


COLUMNS = [field.name for field in fields(Measurement)]


def append(path: Path, measurement: Measurement) -> None:
    """Add one row, so that it survives whatever happens next.

    Raises:
        ValueError: the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn_row(path)
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new:
        _check_header(path)
    row = dataclasses.asdict(measurement)
    row = {
        key: " ".join(value.split()) if isinstance(value, str) else value
        for key, value in row.items()
    }
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Measurement]:
    """All rows of a file, oldest first; a row that a crash cut off is left out.

    Raises:
        ValueError: a column is missing, unknown or holds a value of another type.
    """
    _check_header(path)
    types = {field.name: field.type for field in fields(Measurement)}
    convert = {str: str, int: int, float: float}
    measurements = []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1].splitlines()
    for line, row in enumerate(csv.DictReader(whole), start=2):
        values = {}
        for column in COLUMNS:
            kind = types[column]
            assert isinstance(kind, type)
            try:
                values[column] = convert[kind](row[column])
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {line}: column {column!r} holds {row[column]!r}, which is no "
                    f"{kind.__name__}; correct it or delete the line"
                ) from error
        measurements.append(Measurement(**values))
    return measurements


def latest(measurements: list[Measurement]) -> list[Measurement]:
    """Of each measurement the newest row, whatever the commit, in order of first appearance."""
    newest: dict[tuple[str | int, ...], Measurement] = {}
    for measurement in measurements:
        newest[measurement.key[:-1]] = measurement
    return list(newest.values())


def already_measured(path: Path, key: tuple[str | int, ...]) -> bool:
    """Whether the file has a row with this key, of the same commit."""
    return path.exists() and any(row.key == key for row in read(path))


def _check_header(path: Path) -> None:
    with path.open(newline="") as file:
        header = next(csv.reader(file), [])
    unknown = [column for column in header if column not in COLUMNS]
    missing = [column for column in COLUMNS if column not in header]
    if unknown or missing:
        problems = [f"column {name!r} is unknown" for name in unknown]
        problems += [f"column {name!r} is missing" for name in missing]
        raise ValueError(
            f"{path}: {', '.join(problems)}; rename the columns to those of "
            "benchmarks/records.py, or move the file away and measure again"
        )


def _drop_torn_row(path: Path) -> None:
    """Remove what a crash left of a row that was being written."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


@functools.cache
def machine() -> dict[str, Any]:
    """The columns that describe this machine, the versions and the commit."""
    return {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu_model(),
        "versions": versions(),
        "commit": commit(),
    }


def cpu_model() -> str:
    """The CPU's own name for itself."""
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*: (.*)", info.read_text())):
        return found[1].strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_model() -> str:
    """Such as `2 x NVIDIA H200`; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def versions() -> str:
    """Python and those of PACKAGES that are installed."""
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """The checkout's commit; `unknown` outside git."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    return answer.stdout.strip() or "unknown"


def machine_name() -> str:
    """A short name for folders, such as `intel-xeon-processor-2-cores` or `1-x-nvidia-h200`."""
    here = machine()
    name = str(here["gpu"]) or f"{here['cpu']} {here['cores']} cores"
    name = re.sub(r"\((r|tm)\)|@.*?(?= \d+ cores|$)", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
