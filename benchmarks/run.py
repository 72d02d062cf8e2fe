"""What all benchmarks share: sizes, where the results go, and measuring subjects side by side."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from benchmarks import records
from benchmarks.cases import CASES, FULL, SMALL, Case, make_config, prepare
from benchmarks.records import Measurement
from benchmarks.timing import summarise
from benchmarks.turns import TURN_S, Count, measure
from conf.schema import Config
from runtime.setup import resolve_device

# What a subject that cannot be had here raises when it is built: it becomes a row without a figure.
UNAVAILABLE = (
    *(ModuleNotFoundError, FileNotFoundError, NotImplementedError, ValueError),
    torch.OutOfMemoryError,
    *(HydraException, OmegaConfBaseException),
)


Draw = Callable[[], int]
"""Does one piece of work, such as fetching a batch, and returns the number of items in it."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    data: dict[str, int] = field(default_factory=lambda: dict(SMALL))
    """Samples of each generated data set."""

    own_batch_size: bool = False
    """Batches as large as the experiment's configuration says, not as small as `Case.batch_size`."""

    warmup_s: float = 0.1
    """Seconds that each subject works before anything is counted."""

    window_s: float = 0.25
    """Seconds of one sample."""

    repeats: int = 3
    """Samples of each subject; 6 are the least that give a 95 % interval."""

    run_repeats: int = 1
    """Runs of each entry point."""

    epochs: int = 1
    """Epochs of each of these runs."""

    max_steps: int | None = 40
    """Optimizer steps after which such a run ends early: on a CPU, float16 is slow."""

    every_combination: bool = False
    """Each script with each loader on each number of devices, and each step of the data by number of
    workers; small sizes take a choice."""


SIZES_SMALL = Sizes()
SIZES_FULL = Sizes(
    data=dict(FULL),
    own_batch_size=True,
    warmup_s=5.0,
    window_s=5.0,
    repeats=9,
    run_repeats=3,
    epochs=3,
    max_steps=None,
    every_combination=True,
)


@dataclass(frozen=True)
class Subject:
    """What is measured, as the columns of a row name it."""

    name: str
    num_workers: int = 0
    num_threads: int = 0
    num_devices: int = 1
    settings: str = ""

    def __str__(self) -> str:
        parts = [self.name, self.settings]
        parts += [f"{self.num_workers} workers"] if self.num_workers else []
        parts += [f"{self.num_threads} threads"] if self.num_threads else []
        parts += [f"{self.num_devices} devices"] if self.num_devices > 1 else []
        return ", ".join(part for part in parts if part)


@dataclass
class Run:
    """One call of `python -m benchmarks`."""

    folder: Path
    """Where the CSV files and the report go."""

    sizes: Sizes = SIZES_SMALL

    overrides: tuple[str, ...] = ()
    """Hydra overrides of the command line; they come last, so they win."""

    cases: tuple[str, ...] = tuple(CASES)
    """Names of the cases that may be used."""

    data_dir: Path = Path("data/bench")
    """Where generated data lies."""

    scripts: tuple[str, ...] = ()
    """Names of the entry points that are started; empty: all."""

    prepared: dict[str, list[str]] = field(default_factory=dict)
    """By case, what `case_overrides` found: a process that is sent this run need not look again."""

    def path(self, benchmark: str) -> Path:
        return self.folder / f"{benchmark}.csv"

    @cached_property
    def device(self) -> torch.device:
        return resolve_device(make_config(*self.overrides).device)

    @property
    def turn_s(self) -> float:
        """Seconds; on a GPU long, because what a loader has queued there runs on when it is stopped."""
        return TURN_S if self.device.type == "cpu" else self.sizes.window_s

    @property
    def num_cores(self) -> int:
        """CPU cores for each device: the parallelism that all loaders get."""
        devices = torch.cuda.device_count() if self.device.type == "cuda" else 1
        return max(1, records.num_cores() // max(1, devices))

    def case_overrides(self, name: str) -> list[str]:
        """Overrides that choose a case's data, generated first if need be, at this run's sizes.

        Raises:
            one of UNAVAILABLE: the data cannot be had.
        """
        if name in self.prepared:
            return self.prepared[name]
        case = CASES[name]
        if any(override.startswith("data.root=") for override in self.overrides):
            chosen = list(case.overrides)
        else:
            chosen = prepare(case, self.sizes.data.get(case.generator, 0), self.data_dir)
        if not self.sizes.own_batch_size:
            chosen.append(f"global_batch_size={case.batch_size}")
        self.prepared[name] = [*chosen, *self.overrides]
        return self.prepared[name]

    def config(self, name: str, *overrides: str) -> Config:
        """Configuration of a case; `overrides` win over all others."""
        return make_config(*self.case_overrides(name), *overrides)

    def chosen(self, *names: str) -> list[Case]:
        """Those of the named cases that this run may use."""
        return [CASES[name] for name in names if name in self.cases]

    def is_done(
        self, benchmark: str, case: str, subjects: Iterable[Subject], quantity: str = "speed"
    ) -> bool:
        """Whether an earlier, interrupted run has measured all of them already."""
        return all(
            records.already_measured(
                self.path(benchmark), self._row(benchmark, case, subject, quantity, "").key
            )
            for subject in subjects
        )

    def record(
        self,
        benchmark: str,
        case: str,
        subject: Subject,
        quantity: str,
        unit: str,
        samples: list[float],
        *,
        epoch_size: int = 0,
        note: str = "",
        date: str = "",
    ) -> Measurement:
        """Write one row; without samples `note` must say why."""
        median, low, high = summarise(samples)
        row = replace(
            self._row(benchmark, case, subject, quantity, unit),
            median=round_to_digits(median),
            low=round_to_digits(low),
            high=round_to_digits(high),
            repeats=len(samples),
            samples=";".join(f"{sample:.6g}" for sample in samples),
            epoch_size=epoch_size,
            note=note,
            date=date or now(),
        )
        records.append(self.path(benchmark), row)
        say(f"{benchmark} {case}: {subject}: {quantity} {figure(row)}{note and f' ({note})'}")
        return row

    def compare(
        self,
        benchmark: str,
        case: str,
        builders: Mapping[Subject, Callable[[], Draw]],
        *,
        unit: str,
        epoch_size: int = 0,
        turn_s: float | None = None,
    ) -> None:
        """Measure the speed of all subjects side by side and write a row for each.

        Args:
            benchmark: name of the CSV file.
            case: what they are measured on.
            builders: each builds its subject, in a process of its own, so they can be pickled. What
                a builder raises of UNAVAILABLE is written down as the reason why there is no figure.
            unit: such as `images/s`.
            epoch_size: samples of an epoch of the published data.
            turn_s: length of a turn; by default that of `turn_s` of this run.
        """
        if self.is_done(benchmark, case, builders):
            say(f"{benchmark} {case}: measured already, see {self.path(benchmark)}")
            return
        say(f"{benchmark} {case}: {len(builders)} subjects")
        sizes = self.sizes
        with progress(sizes.repeats, f"{benchmark} {case}") as bar:
            measured = measure(
                {
                    str(subject): partial(_draw_on, build, self.device)
                    for subject, build in builders.items()
                },
                *(sizes.warmup_s, sizes.window_s, sizes.repeats, UNAVAILABLE),
                turn_s=turn_s or self.turn_s,
                after_round=bar.update,
            )
        date = now()
        for subject in builders:
            reason = measured.reasons.get(str(subject), "")
            self.record(
                *(benchmark, case, subject, "speed", unit),
                measured.speeds.get(str(subject), []),
                epoch_size=epoch_size,
                note=reason and f"not measured: {reason}",
                date=date,
            )

    def _row(
        self, benchmark: str, case: str, subject: Subject, quantity: str, unit: str
    ) -> Measurement:
        return Measurement(
            benchmark=benchmark,
            case=case,
            subject=subject.name,
            quantity=quantity,
            num_workers=subject.num_workers,
            num_threads=subject.num_threads,
            num_devices=subject.num_devices,
            settings=subject.settings,
            unit=unit,
            median=math.nan,
            low=math.nan,
            high=math.nan,
            repeats=0,
            samples="",
            epoch_size=0,
            note="",
            date="",
            **records.machine(),
        )


def _draw_on(build: Callable[[], Draw], device: torch.device, count: Count) -> None:
    resolve_device(str(device))  # after which, on a CPU, malloc keeps memory
    draw = build()
    while True:
        count(draw())


def draw_from(epochs: Iterable[Any], device: torch.device | None = None) -> Draw:
    """Draws batch after batch from what gives an epoch each time that it is iterated over.

    Args:
        epochs: a loader; its batches are tensors, sequences, or tuples of these.
        device: where the batches shall lie, if the loader leaves them elsewhere.

    Returns:
        Fetches a batch and returns the number of samples in it.
    """

    def endless_batches() -> Iterator[Any]:
        while True:
            batch = None
            for batch in epochs:
                yield batch
            if batch is None:
                raise ValueError("an epoch without a batch; use more data or smaller batches")

    batches = endless_batches()

    def draw() -> int:
        batch = next(batches)
        parts = batch if isinstance(batch, tuple) else (batch,)
        if device is not None:
            parts = tuple(part.to(device, non_blocking=True) for part in parts)
        return len(parts[0])

    return draw


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def say(text: str) -> None:
    """Print a line without breaking a progress bar; on rank 0 only."""
    if is_first_rank():
        tqdm.write(text, file=sys.stdout)


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def progress(total: int, what: str) -> Any:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(total=total, desc=what, unit="round", leave=False, disable=None)


def round_to_digits(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def figure(row: Measurement) -> str:
    """`1,840 images/s (1,800 to 1,890)`, or `-`."""
    if not row.repeats:
        return "-"
    text = f"{number(row.median)} {row.unit}"
    if row.repeats > 1:
        text += f" ({number(row.low)} to {number(row.high)})"
    return text


def number(value: float) -> str:
    """Three significant digits, with thousands separated by commas; `-` for nan."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def results_folder() -> Path:
    """`benchmarks/results/<machine>-<date>`."""
    date = datetime.now(UTC).date().isoformat()
    return Path(__file__).with_name("results") / f"{records.machine_name()}-{date}"
